#include "lockstep/data/files/image_decoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "lockstep/data/data_file_error.h"
#include "tests/data/datasets/file_contents.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
using namespace std::string_literals;

constexpr uint64_t kMostPixels = 1 << 20;

struct Image {
  size_t height = 0;
  size_t width = 0;
  std::vector<uint8_t> planes;

  int sum(size_t channel) const {
    const auto first = planes.begin() + channel * height * width;
    return std::accumulate(first, first + height * width, 0);
  }
  int at(size_t channel, size_t y, size_t x) const {
    return planes[(channel * height + y) * width + x];
  }
};

Image decode(const std::string& content, uint64_t most_pixels = kMostPixels) {
  // A copy of exactly this size, so that AddressSanitizer sees a read after it.
  const std::vector<uint8_t> bytes(content.begin(), content.end());
  Image image;
  decode_image("f", bytes, most_pixels, [&](size_t height, size_t width) {
    image.height = height;
    image.width = width;
    image.planes.resize(3 * height * width);
    return image.planes.data();
  });
  return image;
}

std::string sample(const std::string& name) {
  std::string content =
      read_file(LOCKSTEP_SOURCE_DIR "/tests/data/datasets/samples/" + name);
  if (content.empty()) throw std::runtime_error("there is no sample " + name);
  return content;
}

struct Sample {
  const char* name;
  // The sum of each channel, and the pixel in row 2 and column 3, as Pillow
  // decodes the file (make_samples.py wrote it with Pillow, too).
  std::array<int, 3> sums;
  std::array<int, 3> pixel;
};

std::vector<Sample> samples() {
  std::vector<Sample> all;
#if LOCKSTEP_HAS_PNG
  all.insert(all.end(),
             {{"alpha.png", {14235, 19178, 16697}, {53, 107, 161}},
              {"colour.png", {14235, 19178, 16697}, {53, 107, 161}},
              {"gray.png", {14235, 14235, 14235}, {53, 53, 53}},
              {"interlaced.png", {14235, 19178, 16697}, {53, 107, 161}},
              {"palette.png", {14358, 19094, 17116}, {58, 116, 174}}});
#endif
#if LOCKSTEP_HAS_JPEG
  all.insert(all.end(),
             {{"cmyk.jpg", {9400, 6011, 7591}, {35, 26, 17}},
              {"colour.jpg", {14351, 19101, 16802}, {47, 111, 159}},
              {"gray.jpg", {14226, 14226, 14226}, {54, 54, 54}},
              {"progressive.jpg", {14351, 19101, 16802}, {47, 111, 159}}});
#endif
  return all;
}

TEST(ImageDecoder, DecodesAsPillow) {
  for (const Sample& expected : samples()) {
    SCOPED_TRACE(expected.name);
    const Image image = decode(sample(expected.name));
    EXPECT_EQ(image.height, 10u);
    EXPECT_EQ(image.width, 13u);
    for (size_t channel = 0; channel < 3; ++channel) {
      EXPECT_EQ(image.sum(channel), expected.sums[channel]);
      EXPECT_EQ(image.at(channel, 2, 3), expected.pixel[channel]);
    }
  }
}

TEST(ImageDecoder, RefusesOtherFiles) {
  EXPECT_EQ(message_of([] { decode(""); }),
            "data file \"f\" is empty; a JPEG or a PNG file is expected");
  EXPECT_THAT(message_of([] { decode("GIF89a"); }),
              HasSubstr("is neither a JPEG nor a PNG file"));
}

// No cut file is an image: what the encoder wrote is needed to its last byte.
TEST(ImageDecoder, SurvivesDamage) {
  for (const Sample& each : samples()) {
    SCOPED_TRACE(each.name);
    EXPECT_EQ(for_damaged(sample(each.name), 1500,
                          [](const std::string& damaged) { decode(damaged); }),
              0u);
  }
}

TEST(ImageDecoder, NamesTheByteWhereAFileIsDamaged) {
#if LOCKSTEP_HAS_JPEG
  const std::string jpeg = sample("colour.jpg");
  EXPECT_EQ(message_of([&] { decode(jpeg.substr(0, 700)); }),
            "data file \"f\" is damaged or cut short near byte 700: the file "
            "ends before the image does");
#endif
#if LOCKSTEP_HAS_PNG
  std::string png = sample("colour.png");
  EXPECT_THAT(message_of([&] { decode(png.substr(0, 80)); }),
              HasSubstr("is damaged or cut short near byte "));
  png[50] ^= 1;
  EXPECT_THAT(message_of([&] { decode(png); }),
              HasSubstr("is damaged or cut short near byte "));
#endif
}

// A header may claim any size; nothing must be allocated for it.
TEST(ImageDecoder, RefusesClaimsBeforeItAllocates) {
  [[maybe_unused]] const auto refusal = [](const std::string& content,
                                           uint64_t most) {
    bool allocated = false;
    const std::vector<uint8_t> bytes(content.begin(), content.end());
    std::string text = message_of([&] {
      decode_image("f", bytes, most, [&](size_t, size_t) -> uint8_t* {
        allocated = true;
        throw std::bad_alloc();
      });
    });
    EXPECT_FALSE(allocated);
    return text;
  };
#if LOCKSTEP_HAS_JPEG
  std::string jpeg = sample("gray.jpg");
  EXPECT_THAT(refusal(jpeg, 129),
              HasSubstr("claims an image of 13 x 10 pixels; 1 to 129 pixels "
                        "are allowed (max_pixels)"));
  const size_t frame = jpeg.find("\xff\xc0"s);
  ASSERT_NE(frame, std::string::npos);
  jpeg.replace(frame + 5, 4, "\xff\xdc\xff\xdc");
  EXPECT_THAT(refusal(jpeg, UINT64_MAX),
              HasSubstr("claims an image of 65500 x 65500 pixels, but a JPEG "
                        "file of 366 bytes cannot hold so many"));
#endif
#if LOCKSTEP_HAS_PNG
  EXPECT_THAT(refusal(sample("gray.png"), 129), HasSubstr("max_pixels"));
  // 900,000 x 900,000, with the checksum that belongs to it.
  std::string png = sample("gray.png");
  png.replace(16, 8, "\0\x0d\xbb\xa0\0\x0d\xbb\xa0"s);
  const auto sum = static_cast<uint32_t>(
      ::crc32(0, reinterpret_cast<const Bytef*>(png.data()) + 12, 17));
  for (int i = 0; i < 4; ++i) {
    png[29 + static_cast<size_t>(i)] = static_cast<char>(sum >> (24 - 8 * i));
  }
  EXPECT_THAT(refusal(png, UINT64_MAX),
              HasSubstr("but a PNG file of 75 bytes cannot hold so many"));
#endif
}

#if LOCKSTEP_HAS_JPEG
// A progressive file can have any number of scans, each of some bytes, and
// libjpeg goes through the whole image for each.
TEST(ImageDecoder, RefusesAProgressiveJpegWithThousandsOfScans) {
  std::string jpeg = sample("progressive.jpg");
  const size_t scan = jpeg.find("\xff\xda"s);
  ASSERT_NE(scan, std::string::npos);
  size_t next = jpeg.find("\xff\xda"s, scan + 2);
  ASSERT_NE(next, std::string::npos);
  std::string first = jpeg.substr(scan, next - scan);
  std::string many = jpeg.substr(0, scan);
  for (int i = 0; i < 2000; ++i) many += first;
  many += jpeg.substr(next);
  EXPECT_THAT(message_of([&] { decode(many); }),
              HasSubstr("it has more than 500 scans"));
}
#endif

// Exceptions of the callback pass through no frame of C.
TEST(ImageDecoder, PassesOnWhatTheCallbackThrows) {
  for (const Sample& each : samples()) {
    const std::string content = sample(each.name);
    const std::vector<uint8_t> bytes(content.begin(), content.end());
    EXPECT_EQ(message_of([&] {
                decode_image("f", bytes, kMostPixels,
                             [](size_t, size_t) -> uint8_t* {
                               throw std::runtime_error("no memory for it");
                             });
              }),
              "no memory for it");
  }
}

}  // namespace
}  // namespace lockstep::internal
