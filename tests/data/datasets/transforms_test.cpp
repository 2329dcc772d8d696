#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <set>

#include "lockstep/data/transforms.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Sizes = c10::IntArrayRef;

template <class Run>
void refuses(Run&& run, const char* message) {
  EXPECT_THAT(run, ThrowsMessage<std::invalid_argument>(HasSubstr(message)));
}

// Pixel (y, x) of channel c is 100 c + 10 y + x.
at::Tensor numbered_image(int64_t height, int64_t width, int64_t channels = 2) {
  const auto y = torch::arange(height).view({1, -1, 1});
  const auto x = torch::arange(width).view({1, 1, -1});
  const auto c = torch::arange(channels).view({-1, 1, 1});
  return (c * 100 + y * 10 + x).to(torch::kByte);
}

TEST(ToFloat, ScalesBytesToOne) {
  const auto image = torch::tensor({0, 51, 255}, torch::kByte);
  EXPECT_TRUE(
      torch::allclose(ToFloat()(image), torch::tensor({0.f, .2f, 1.f})));
  EXPECT_EQ(ToFloat()(image).dtype(), torch::kFloat);
  EXPECT_EQ(image[2].item<int>(), 255) << "the input is not changed";
  EXPECT_TRUE(torch::equal(ToFloat()(torch::tensor({2.5}, torch::kDouble)),
                           torch::tensor({2.5f})));
  refuses([] { ToFloat()(torch::ones({2}, torch::kLong)); },
          "the tensor is Long; uint8 and floating-point types are allowed");
}

TEST(Normalize, SubtractsAndDividesPerChannel) {
  const auto image = torch::tensor({1., 2., 3., 4.}).view({2, 1, 2});
  const auto result = Normalize({1, 2}, {2, 4})(image);
  EXPECT_TRUE(
      torch::equal(result, torch::tensor({0., .5, .25, .5}).view({2, 1, 2})));
  EXPECT_EQ(image.sum().item<float>(), 10) << "the input is not changed";
  const auto batch = torch::stack({image, image}).to(torch::kDouble);
  EXPECT_TRUE(torch::equal(Normalize({1}, {2})(batch), (batch - 1) / 2));
  EXPECT_EQ(Normalize({1}, {2})(batch).dtype(), torch::kDouble);
  // Failed for images on another device than the CPU.
  const auto elsewhere = torch::ones({2, 3, 3}, torch::kMeta);
  EXPECT_TRUE(Normalize({1, 2}, {2, 4})(elsewhere).is_meta());
}

TEST(Normalize, RefusesWhatDoesNotFit) {
  refuses([] { Normalize({}, {}); }, "there are 0 means and 0 deviations");
  refuses([] { Normalize({1, 2}, {1}); }, "there are 2 means and 1 deviations");
  refuses([] { Normalize({1}, {0}); }, "a deviation is 0");
  const Normalize normalize({1, 2}, {1, 1});
  refuses([&] { normalize(torch::ones({2, 1, 1}, torch::kByte)); },
          "the image is Byte; a floating-point type is needed: use ToFloat");
  refuses([&] { normalize(torch::ones({3, 1, 1})); },
          "the image has 3 channels; with 2 means");
  refuses([&] { normalize(torch::ones({2, 1})); },
          "the image has 2 dimensions");
}

TEST(Resize, MakesTheShorterSideAsLongAsAsked) {
  const auto size = [](int64_t height, int64_t width) {
    return Resize(10)(torch::zeros({3, height, width})).sizes().vec();
  };
  EXPECT_EQ(size(20, 40), (std::vector<int64_t>{3, 10, 20}));
  EXPECT_EQ(size(40, 20), (std::vector<int64_t>{3, 20, 10}));
  EXPECT_EQ(size(7, 10), (std::vector<int64_t>{3, 10, 14}));  // 14.28
  EXPECT_EQ(size(5, 5), (std::vector<int64_t>{3, 10, 10}));
}

TEST(Resize, KeepsDtypeAndDimensions) {
  for (const auto dtype : {torch::kByte, torch::kFloat, torch::kDouble}) {
    for (const std::vector<int64_t>& lead :
         {std::vector<int64_t>{}, {3}, {2, 3}}) {
      std::vector<int64_t> sizes = lead;
      sizes.insert(sizes.end(), {8, 6});
      const auto image = torch::full(sizes, 77, dtype);
      const auto result = Resize(4, 12)(image);
      EXPECT_EQ(result.dtype(), dtype);
      sizes[sizes.size() - 2] = 4;
      sizes[sizes.size() - 1] = 12;
      EXPECT_EQ(result.sizes(), Sizes(sizes));
      EXPECT_TRUE(torch::equal(result, torch::full(sizes, 77, dtype)));
    }
  }
}

TEST(Resize, AveragesOnlyWithAntialias) {
  // Columns 0, 100, 0, 100, ...: the average is 50.
  auto image = torch::zeros({1, 4, 16});
  image.slice(2, 1, 16, 2).fill_(100);
  const auto smooth = Resize(4, 2)(image);
  EXPECT_LT((smooth - 50).abs().max().item<float>(), 5);
  const auto rough = Resize(4, 4, {.antialias = false})(image);
  EXPECT_TRUE(torch::equal(rough, torch::full({1, 4, 4}, 50.f)));
  const auto rougher =
      Resize(4, 8, {.antialias = false})(image.roll(1, 2)).slice(2, 1, 7);
  EXPECT_TRUE(torch::equal(rougher, torch::full({1, 4, 6}, 50.f)));
  const auto picked = Resize(4, 1, {.antialias = false})(image.slice(2, 0, 3));
  EXPECT_TRUE(torch::equal(picked, torch::full({1, 4, 1}, 100.f)))
      << "one pixel of three, instead of their mean";
}

TEST(Resize, RefusesWhatIsNoImage) {
  refuses([] { Resize resize(0); }, "Resize: the size is 0 x 0");
  refuses([] { Resize resize(4, -1); }, "the size is 4 x -1 (height x width)");
  refuses([] { Resize(4)(torch::ones({3})); },
          "the image is a tensor of size [3]; give [..., height, width]");
  refuses([] { Resize(4)(torch::ones({3, 0, 4})); }, "of size [3, 0, 4]");
  refuses([] { Resize(4)(at::Tensor()); }, "an undefined tensor");
  refuses([] { Resize(4)(torch::ones({4, 4}, torch::kLong)); },
          "the image has 2 dimensions of Long");
  refuses([] { Resize(4)(torch::ones({1, 1, 1, 2, 2})); }, "5 dimensions");
  refuses([] { Resize(INT64_MAX)(torch::ones({1, 1, 2})); }, "is too large");
}

TEST(CenterCrop, CutsOutTheMiddle) {
  const auto corner = [](int64_t height, int64_t width, CenterCrop crop) {
    const auto cut = crop(numbered_image(height, width));
    return cut[0][0][0].item<int>();
  };
  EXPECT_EQ(corner(8, 9, CenterCrop(4, 5)), 22);
  // An odd rest: Python rounds a half to the even number.
  EXPECT_EQ(corner(7, 9, CenterCrop(4, 8)), 20);  // 1.5 and 0.5
  EXPECT_EQ(corner(9, 9, CenterCrop(4, 9)), 20);  // 2.5
  EXPECT_EQ(CenterCrop(4)(numbered_image(8, 9)).sizes(), (Sizes{2, 4, 4}));
}

TEST(CenterCrop, SurroundsASmallImageWithZeros) {
  const auto cut = CenterCrop(5, 4)(numbered_image(2, 9, 1) + 1);
  EXPECT_EQ(cut.sizes(), (Sizes{1, 5, 4}));
  EXPECT_TRUE(torch::equal(cut[0].sum(1),
                           torch::tensor({0, 18, 58, 0, 0}, torch::kLong)));
  refuses([] { CenterCrop crop(0); }, "CenterCrop: the size is 0 x 0");
}

TEST(RandomCrop, ChoosesEachPlaceEquallyOften) {
  const auto image = numbered_image(5, 4);
  const RandomCrop crop(3, 3);
  std::map<int, int> corners;
  for (uint64_t i = 0; i < 6000; ++i) {
    SampleRandom random(SampleSeed{i});
    const auto cut = crop(image, random);
    ASSERT_EQ(cut.sizes(), (Sizes{2, 3, 3}));
    const int corner = cut[0][0][0].item<int>();
    ++corners[corner];
    ASSERT_EQ(cut[1][2][1].item<int>(), corner + 121);
  }
  ASSERT_EQ(corners.size(), 6u);
  for (const auto& [corner, count] : corners) {
    EXPECT_NEAR(count, 1000, 150) << corner;
  }
}

TEST(RandomCrop, AddsPixelsAroundTheImage) {
  const auto image = numbered_image(2, 2, 1) + 1;
  SampleRandom random(SampleSeed{0});
  const auto whole = RandomCrop(6, {.padding = 2, .fill = 9})(image, random);
  EXPECT_EQ(whole.sum().item<int64_t>(), 9 * 32 + 1 + 2 + 11 + 12);
  EXPECT_EQ(whole[0][2][2].item<int>(), 1);

  // As torchvision: what is lacking is added on both sides.
  std::set<int64_t> sums;
  for (uint64_t i = 0; i < 200; ++i) {
    SampleRandom other(SampleSeed{i});
    const auto cut = RandomCrop(3, 2, {.pad_if_needed = true})(image, other);
    ASSERT_EQ(cut.sizes(), (Sizes{1, 3, 2}));
    sums.insert(cut.sum().item<int64_t>());
  }
  EXPECT_EQ(sums, (std::set<int64_t>{26}));
  refuses([&] { RandomCrop(3)(image, random); },
          "3 x 3 pixels (height x width) cannot be cut out of 2 x 2");
  refuses([] { RandomCrop crop(3, {.padding = -1}); }, "padding is -1");
}

TEST(RandomHorizontalFlip, MirrorsWithItsProbability) {
  const auto image = numbered_image(2, 3);
  int flipped = 0;
  for (uint64_t i = 0; i < 4000; ++i) {
    SampleRandom random(SampleSeed{i});
    const auto result = RandomHorizontalFlip(0.25)(image, random);
    const bool mirrored = result[0][0][0].item<int>() == 2;
    ASSERT_TRUE(torch::equal(result, mirrored ? image.flip({2}) : image));
    flipped += mirrored ? 1 : 0;
  }
  EXPECT_NEAR(flipped, 1000, 140);
  refuses([] { RandomHorizontalFlip flip(1.5); },
          "the probability is 1.500000; it must be in [0, 1]");
}

// The sums over the parts that RandomResizedCrop cuts out of an image of 60 x
// 80 pixels.
struct CutParts {
  static constexpr int kDraws = 2000;
  double area = 0;  // of the image's area
  double log_ratio = 0;
  double top = 0;  // of the places that there are
  double left = 0;
};

// The parts are told from an image whose pixels are their coordinates.
CutParts cut_parts(const RandomResizedCropOptions& options) {
  constexpr double kHeight = 60;
  constexpr double kWidth = 80;
  const auto y = torch::arange(kHeight, torch::kDouble).view({-1, 1});
  const auto x = torch::arange(kWidth, torch::kDouble).view({1, -1});
  const auto image = torch::stack({y.expand({60, 80}), x.expand({60, 80})});
  RandomResizedCropOptions rough = options;
  rough.antialias = false;
  const RandomResizedCrop crop(2, 2, rough);
  CutParts sums;
  for (uint64_t i = 0; i < CutParts::kDraws; ++i) {
    SampleRandom random(SampleSeed{i});
    const auto cut = crop(image, random);
    EXPECT_EQ(cut.sizes(), (Sizes{2, 2, 2}));
    // The two pixels of a row of length n are from n / 4 - 1/2 and n / 2 after
    // it.
    const auto first = [&](int64_t c) { return cut[c][0][0].item<double>(); };
    const double height = 2 * (cut[0][1][0].item<double>() - first(0));
    const double width = 2 * (cut[1][0][1].item<double>() - first(1));
    const double top = first(0) - height / 4 + 0.5;
    const double left = first(1) - width / 4 + 0.5;
    const double area = height * width / (kHeight * kWidth);
    // Sizes are rounded to whole pixels.
    EXPECT_GT(area, options.scale[0] - 0.01);
    EXPECT_LT(area, options.scale[1] + 0.01);
    EXPECT_GT(width / height, options.ratio[0] * 0.9);
    EXPECT_LT(width / height, options.ratio[1] * 1.1);
    EXPECT_GE(top, -0.01);
    EXPECT_LE(top + height, kHeight + 0.01);
    EXPECT_GE(left, -0.01);
    EXPECT_LE(left + width, kWidth + 0.01);
    sums.area += area;
    sums.log_ratio += std::log(width / height);
    sums.top += top / std::max(kHeight - height, 1.0);
    sums.left += left / std::max(kWidth - width, 1.0);
  }
  return sums;
}

// Bounds are five standard deviations.
TEST(RandomResizedCrop, CutsPartsOfTheAskedSizeAndShape) {
  const CutParts large = cut_parts({});
  // Large parts often do not fit. The means come from another program that
  // draws as torchvision does.
  EXPECT_NEAR(large.area / CutParts::kDraws, 0.438, 0.025);
  EXPECT_NEAR(large.log_ratio / CutParts::kDraws, 0.0307, 0.019);

  // Small parts always fit, so nothing favours a shape or a place.
  const CutParts small = cut_parts({.scale = {0.05, 0.1}, .ratio = {0.25, 4}});
  EXPECT_NEAR(small.area / CutParts::kDraws, 0.075, 0.002);
  EXPECT_NEAR(small.log_ratio / CutParts::kDraws, 0, 0.09);
  EXPECT_NEAR(small.top / CutParts::kDraws, 0.5, 0.033);
  EXPECT_NEAR(small.left / CutParts::kDraws, 0.5, 0.033);
}

TEST(RandomResizedCrop, TakesTheMiddleIfNothingFits) {
  // No part of this image has an allowed shape and 90 % of its area.
  const auto image = numbered_image(4, 40, 1);
  SampleRandom random(SampleSeed{0});
  const auto cut =
      RandomResizedCrop(4, 5, {.scale = {0.9, 1.0}})(image, random);
  // 4 x round(4 * 4/3) pixels from column (40 - 5) / 2 on.
  EXPECT_TRUE(torch::equal(cut, image.slice(2, 17, 22)));
  const auto high = image.transpose(1, 2);
  const auto rows =
      RandomResizedCrop(5, 4, {.scale = {0.9, 1.0}})(high, random);
  EXPECT_TRUE(torch::equal(rows, high.slice(1, 17, 22)));
}

TEST(RandomResizedCrop, RefusesRangesThatAreNone) {
  refuses([] { RandomResizedCrop crop(4, {.scale = {0.5, 0.1}}); },
          "scale is {0.500000, 0.100000}; give two numbers above 0");
  refuses([] { RandomResizedCrop crop(4, {.ratio = {0, 1}}); }, "ratio is {0");
  refuses([] { RandomResizedCrop crop(4, {.ratio = {1, NAN}}); }, "ratio is");
  refuses([] { RandomResizedCrop crop(0); }, "RandomResizedCrop: the size");
}

}  // namespace
}  // namespace lockstep::internal
