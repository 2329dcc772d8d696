#include "lockstep/data/datasets/safetensors_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/data/data_file_error.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/datasets/selected_samples.h"
#include "lockstep/data/distributed_sampler.h"
#include "tests/data/datasets/file_contents.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace lockstep::internal::testing;

struct StoredTensor {
  std::string name;
  std::string dtype;
  at::Tensor values;
};

// Returns a file with these tensors one after another, so that they may lie at
// odd addresses.
std::string stored(const std::vector<StoredTensor>& tensors) {
  std::string header = "{";
  std::string bytes;
  for (const auto& [name, dtype, values] : tensors) {
    std::string sizes;
    for (const int64_t size : values.sizes()) {
      sizes += (sizes.empty() ? "" : ",") + std::to_string(size);
    }
    header += (bytes.empty() && header.size() == 1 ? "\"" : ",\"") + name +
              R"(":{"dtype":")" + dtype + R"(","shape":[)" + sizes +
              R"(],"data_offsets":[)" + std::to_string(bytes.size()) + ",";
    const auto whole = values.contiguous();
    bytes.append(static_cast<const char*>(whole.const_data_ptr()),
                 whole.nbytes());
    header += std::to_string(bytes.size()) + "]}";
  }
  return safetensors(header + "}", bytes);
}

TEST(SafetensorsDataset, GivesTheRowsOfSeveralFiles) {
  const TemporaryFolder folder;
  const auto data = torch::randn({7, 3, 2});
  const auto target = torch::arange(7);
  // One byte before the others, so that these are not aligned.
  const auto odd = torch::zeros({1}, torch::kByte);
  const auto file = [&](const char* name, int64_t begin, int64_t end) {
    return folder.write(
        name, stored({{"odd", "U8", odd},
                      {"data", "F32", data.slice(0, begin, end)},
                      {"target", "I64", target.slice(0, begin, end)}}));
  };
  const std::string first = file("a", 0, 3);
  const std::string none = file("b", 3, 3);
  const std::string last = file("c", 3, 7);
  const std::vector<std::string> paths{first, none, last};
  for (const SafetensorsDataset& dataset :
       {SafetensorsDataset(paths), SafetensorsDataset({first, last}),
        SafetensorsDataset(file("all", 0, 7))}) {
    ASSERT_EQ(dataset.size(), 7u);
    const std::vector<size_t> indices{6, 0, 2, 3, 3, 5};
    const auto batch = dataset.get_batch(indices);
    const auto numbers = torch::tensor({6, 0, 2, 3, 3, 5}, torch::kLong);
    EXPECT_TRUE(torch::equal(batch.data, data.index_select(0, numbers)));
    EXPECT_TRUE(torch::equal(batch.target, numbers));
    for (size_t i = 0; i < 7; ++i) {
      const auto sample = dataset.get(i);
      EXPECT_TRUE(torch::equal(sample.data, data[static_cast<int64_t>(i)]));
      EXPECT_EQ(sample.target.dim(), 0);
      EXPECT_EQ(sample.target.item<int64_t>(), static_cast<int64_t>(i));
    }
    EXPECT_EQ(dataset.get_batch({}).data.sizes(), (c10::IntArrayRef{0, 3, 2}));
    EXPECT_THROW(dataset.get(7), c10::IndexError);
    EXPECT_THROW(dataset.get_batch(size_t{7}), c10::IndexError);
    for (const int64_t workers : {0, 3}) {
      DistributedSampler sampler(7, {.shuffle = false});
      DataLoader loader(dataset, sampler,
                        {.batch_size = 3, .num_workers = workers});
      std::vector<at::Tensor> all;
      for (auto& each : loader) all.push_back(each.data);
      EXPECT_TRUE(torch::equal(torch::cat(all), data));
    }
  }
  // The dataset keeps the files open, and no batch changes them.
  SafetensorsDataset dataset(paths);
  std::filesystem::remove(first);
  const Subset copy(dataset, {0});
  dataset = SafetensorsDataset(last);
  copy.get(0).data.zero_();
  EXPECT_TRUE(torch::equal(copy.get(0).data, data[0]));
}

TEST(SafetensorsDataset, TakesTheNamedTensors) {
  const TemporaryFolder folder;
  const std::string path = folder.write(
      "f", stored({{"x", "BF16", torch::ones({2, 0, 4}, torch::kBFloat16)},
                   {"mask", "BOOL", torch::tensor({true, false})},
                   {"half", "F16", torch::ones({2}, torch::kHalf)}}));
  const SafetensorsDataset both(path, {.data = "mask", .target = "half"});
  EXPECT_TRUE(torch::equal(both.get_batch(std::vector<size_t>{1, 0}).data,
                           torch::tensor({false, true})));
  EXPECT_EQ(both.get(0).target.dtype(), torch::kHalf);

  const SafetensorsDataset alone(path, {.data = "x", .target = {}});
  EXPECT_EQ(alone.size(), 2u);
  EXPECT_EQ(alone.get(1).data.sizes(), (c10::IntArrayRef{0, 4}));
  EXPECT_EQ(alone.get(1).target.sizes(), (c10::IntArrayRef{0}));
  const auto batch = alone.get_batch(std::vector<size_t>{1, 0, 1});
  EXPECT_EQ(batch.data.sizes(), (c10::IntArrayRef{3, 0, 4}));
  EXPECT_EQ(batch.data.dtype(), torch::kBFloat16);
  EXPECT_EQ(batch.target.sizes(), (c10::IntArrayRef{3, 0}));
}

TEST(SafetensorsDataset, NamesWhatDoesNotFit) {
  const TemporaryFolder folder;
  const auto rows = torch::zeros({2, 3});
  const auto labels = torch::zeros({2}, torch::kLong);
  const std::string good = folder.write(
      "good", stored({{"data", "F32", rows}, {"target", "I64", labels}}));
  EXPECT_THAT(
      message_of([&] { SafetensorsDataset dataset(good, {.data = "images"}); }),
      AllOf(HasSubstr("there is no tensor \"images\" in "),
            HasSubstr("it has \"data\", \"target\"")));
  EXPECT_THAT(
      message_of([] { SafetensorsDataset none(std::vector<std::string>{}); }),
      HasSubstr("there is no file; give one or more"));
  EXPECT_THROW(SafetensorsDataset(folder.file("absent")), std::system_error);

  const auto refused = [&](const std::vector<StoredTensor>& tensors,
                           const char* message) {
    const std::string path = folder.write("bad", stored(tensors));
    EXPECT_THAT(message_of([&] { SafetensorsDataset dataset({good, path}); }),
                HasSubstr(message));
  };
  refused({{"data", "F32", rows},
           {"target", "I64", torch::zeros({3}, torch::kLong)}},
          "bad\" has 2 rows of \"data\" and 3 of \"target\"; there must be one "
          "target for each sample");
  refused({{"data", "F32", torch::tensor(1.0f)}, {"target", "I64", labels}},
          "bad\" has a single number as the tensor \"data\"; its first "
          "dimension must count the samples");
  refused({{"data", "F32", torch::zeros({2, 4})}, {"target", "I64", labels}},
          "has samples of F32 [4] as the tensor \"data\", but \"");
  refused({{"data", "I32", torch::zeros({2, 3}, torch::kInt)},
           {"target", "I64", labels}},
          "good\" has F32 [3]; all files must have the same");
  refused({{"data", "F32", rows}, {"target", "I32", labels.to(torch::kInt)}},
          "has samples of I32 [] as the tensor \"target\"");

  const std::string bools = folder.write(
      "bools",
      stored({{"data", "BOOL", torch::tensor({1, 0, 2}, torch::kByte)}}));
  const SafetensorsDataset dataset(bools, {.target = {}});
  EXPECT_TRUE(dataset.get(0).data.item<bool>());
  EXPECT_THAT(
      message_of([&] { dataset.get_batch(size_t{2}); }),
      HasSubstr("is damaged: row 2 of the tensor \"data\" holds a bool that"));
}

}  // namespace
}  // namespace lockstep::internal
