// Files that Python wrote, and what Python reads from them (peers.py).

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "lockstep/data/datasets/cifar_dataset.h"
#include "lockstep/data/datasets/csv_dataset.h"
#include "lockstep/data/datasets/idx_dataset.h"
#include "lockstep/data/datasets/image_folder.h"
#include "lockstep/data/datasets/safetensors_dataset.h"
#include "lockstep/data/datasets/selected_samples.h"
#include "lockstep/data/datasets/token_dataset.h"
#include "lockstep/data/files/csv_reader.h"
#include "lockstep/data/held_dataset.h"
#include "lockstep/data/transforms.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using namespace lockstep::internal::testing;
using Json = nlohmann::json;

class DatasetsInterop : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(LOCKSTEP_TORCH_PYTHON)) {
      GTEST_SKIP() << "LibTorch has no Python beside it: "
                   << LOCKSTEP_TORCH_PYTHON;
    }
  }

  // Runs peers.py and returns what it printed.
  Json python(const std::string& command) {
    const std::string line = std::string(LOCKSTEP_TORCH_PYTHON) +
                             " -W ignore " LOCKSTEP_SOURCE_DIR
                             "/tests/data/datasets/peers.py " +
                             command + " " + folder_.path();
    std::string output;
    FILE* pipe = popen(line.c_str(), "r");
    if (!pipe) throw std::runtime_error("popen failed");
    std::array<char, 1 << 16> chunk;
    while (const size_t read = fread(chunk.data(), 1, chunk.size(), pipe)) {
      output.append(chunk.data(), read);
    }
    if (pclose(pipe) != 0) throw std::runtime_error("peers.py failed");
    return Json::parse(output);
  }

  std::string file(const Json& name) const {
    return folder_.file(name.get<std::string>());
  }

  // Returns an array that Python saved.
  at::Tensor array(const Json& saved) const {
    static const std::map<std::string, at::ScalarType> kDtypes{
        {"uint8", at::kByte},    {"int8", at::kChar},  {"int16", at::kShort},
        {"int32", at::kInt},     {"int64", at::kLong}, {"float32", at::kFloat},
        {"float64", at::kDouble}};
    std::string bytes = read_file(file(saved["file"]));
    const auto sizes = saved["sizes"].get<std::vector<int64_t>>();
    return at::from_blob(bytes.data(), sizes,
                         at::TensorOptions(kDtypes.at(saved["dtype"])))
        .clone();
  }

  TemporaryFolder folder_;
};

// Compares bits, so that NaN equals NaN.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.dtype() != b.dtype() || a.sizes() != b.sizes()) return false;
  const auto x = a.contiguous();
  const auto y = b.contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

std::vector<size_t> all_of_size(size_t size) {
  std::vector<size_t> indices(size);
  for (size_t i = 0; i < size; ++i) indices[i] = i;
  return indices;
}

TEST_F(DatasetsInterop, TablesAreReadAsByPythonsCsvModule) {
  const Json peer = python("csv");
  ASSERT_EQ(peer["tables"].size(), 200u);
  for (const Json& table : peer["tables"]) {
    const MappedFile mapped(file(table["file"]));
    const auto bytes = open_bytes(mapped);
    CsvReader reader(mapped.path(), *bytes,
                     table["separator"].get<std::string>()[0]);
    std::vector<std::vector<std::string>> rows;
    while (reader.next()) {
      auto& row = rows.emplace_back();
      for (size_t i = 0; i < reader.size(); ++i) row.emplace_back(reader[i]);
    }
    ASSERT_EQ(rows, table["rows"].get<decltype(rows)>()) << table["file"];
  }
}

TEST_F(DatasetsInterop, NumbersAreReadAsByPythonsFloat) {
  const Json peer = python("csv");
  const std::string path = folder_.file("numbers.csv");
  const CsvDataset wide(path, {.dtype = at::kDouble});
  EXPECT_GT(wide.size(), 200u);
  EXPECT_TRUE(same_bits(wide.data(), array(peer["float64"])));
  const CsvDataset narrow(path);
  EXPECT_TRUE(same_bits(narrow.data(), array(peer["float32"])));
}

TEST_F(DatasetsInterop, SafetensorsOfPythonAreRead) {
  const Json peer = python("safetensors");
  if (peer.empty()) {
    GTEST_SKIP() << "the package safetensors is not installed";
  }
  const std::vector<std::string> paths{file(peer["files"][0]),
                                       file(peer["files"][1])};
  ASSERT_EQ(peer["columns"].size(), 8u);
  for (const Json& column : peer["columns"]) {
    const SafetensorsDataset rows(paths,
                                  {.data = column["name"].get<std::string>(),
                                   .target = "column of int64"});
    ASSERT_EQ(rows.size(), 9u);
    const auto batch = rows.get_batch(all_of_size(9));
    const bool is_bool = batch.data.dtype() == at::kBool;
    EXPECT_EQ(is_bool, column["name"] == "column of bool");
    const auto data = is_bool ? batch.data.to(at::kByte) : batch.data;
    EXPECT_TRUE(same_bits(data, array(column["array"]))) << column;
    EXPECT_TRUE(same_bits(batch.target, array(peer["columns"][4]["array"])));
  }
}

TEST_F(DatasetsInterop, BinaryFilesOfNumpyAreRead) {
  const Json peer = python("files");
  ASSERT_EQ(peer["idx"].size(), 12u);
  for (const Json& each : peer["idx"]) {
    const at::Tensor expected = array(each["array"]);
    const IdxDataset data(file(each["file"]), file(each["file"]));
    const auto batch = data.get_batch(all_of_size(data.size()));
    EXPECT_TRUE(same_bits(batch.data, expected)) << each;
    EXPECT_TRUE(same_bits(data.get(3).data, expected[3])) << each;
  }

  const Cifar10Dataset cifar(folder_.path());
  const auto batch = cifar.get_batch(all_of_size(20));
  EXPECT_TRUE(same_bits(batch.data, array(peer["cifar"]["images"])));
  EXPECT_TRUE(torch::equal(
      batch.target,
      torch::tensor(peer["cifar"]["labels"].get<std::vector<int64_t>>())));

  for (const auto& [name, dtype] :
       {std::pair{"uint16", at::kUInt16}, {"uint32", at::kUInt32}}) {
    const at::Tensor expected = array(peer["tokens"][name]);
    const TokenDataset tokens(folder_.file(std::string("tokens.") + name), 99,
                              {.dtype = dtype});
    ASSERT_EQ(tokens.size(), 10u);
    const auto all = tokens.get_batch(all_of_size(10));
    EXPECT_TRUE(torch::equal(all.data.view({-1}), expected.slice(0, 0, 990)));
    EXPECT_TRUE(torch::equal(all.target.view({-1}), expected.slice(0, 1, 991)));
  }
}

// Pixels are equal; for JPEG this holds as long as both sides use
// libjpeg-turbo. Another libjpeg may round otherwise by up to 2.
TEST_F(DatasetsInterop, ImagesAreListedAndDecodedAsByPillow) {
  if (std::system(LOCKSTEP_TORCH_PYTHON " -c 'import PIL' 2>/dev/null") != 0) {
    GTEST_SKIP() << "this Python has no Pillow: " << LOCKSTEP_TORCH_PYTHON
                 << " -m pip install pillow";
  }
  const Json peer = python("images");
  const ImageFolder images(folder_.file("root"));
  EXPECT_EQ(images.classes(), peer["classes"].get<std::vector<std::string>>());
  ASSERT_EQ(images.size(), peer["samples"].size());
  ASSERT_GT(images.size(), 100u);
  size_t different = 0;
  for (size_t i = 0; i < images.size(); ++i) {
    const Json& expected = peer["samples"][i];
    SCOPED_TRACE(expected["path"]);
    ASSERT_EQ(images.path(i), expected["path"].get<std::string>());
    ASSERT_EQ(images.target(i), expected["label"].get<int64_t>());
    const auto image = images.get(i).data;
    const auto pixels = array(expected["pixels"]);
    ASSERT_EQ(image.sizes(), pixels.sizes());
    const int most = (image.to(torch::kInt) - pixels.to(torch::kInt))
                         .abs()
                         .max()
                         .item<int>();
    const bool png = images.path(i).find(".png") != std::string::npos ||
                     images.path(i).find(".PNG") != std::string::npos;
    EXPECT_LE(most, png ? 0 : 2);
    different += most > 0 ? 1 : 0;
  }
  RecordProperty("images_that_differ", static_cast<int>(different));
  EXPECT_EQ(different, 0u);
}

TEST_F(DatasetsInterop, OrdersAreThoseOfTorch) {
  const Json peer = python("torch");
  struct Counting {
    size_t length;
    size_t get(size_t index) const { return index; }
    size_t size() const { return length; }
  };
  for (const Json& split : peer["splits"]) {
    const auto parts = random_split(Counting{split["size"]},
                                    split["lengths"].get<std::vector<double>>(),
                                    split["seed"]);
    ASSERT_EQ(parts.size(), split["parts"].size());
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(parts[i].indices(),
                split["parts"][i].get<std::vector<size_t>>())
          << split;
    }
  }
  for (const Json& order : peer["orders"]) {
    const ShuffledDataset shuffled(Counting{order["size"]}, order["seed"]);
    EXPECT_EQ(shuffled.get_batch(all_of_size(shuffled.size())),
              order["order"].get<std::vector<size_t>>());
  }
  struct Hundred : Counting {
    size_t get(size_t index) const { return 100 + index; }
  };
  const ConcatDataset joined(Subset(Counting{10}, {3, 3, 9}), Hundred{{2}},
                             Counting{0});
  EXPECT_EQ(HeldDataset(joined).get_batch(all_of_size(joined.size())),
            peer["joined"].get<std::vector<size_t>>());
}

TEST_F(DatasetsInterop, TransformsGiveTheNumbersOfTorch) {
  const Json peer = python("torch");
  ASSERT_EQ(peer["resized"].size(), 16u);
  for (const Json& each : peer["resized"]) {
    const Resize resize(each["size"][0], each["size"][1],
                        {.antialias = each["antialias"]});
    EXPECT_TRUE(same_bits(resize(array(each["image"])), array(each["result"])))
        << each;
  }
  for (const Json& middle : peer["middles"]) {
    const auto row = torch::arange(middle["have"].get<int64_t>()).view({1, -1});
    const auto cut = CenterCrop(1, middle["want"])(row);
    EXPECT_EQ(cut[0][0].item<int64_t>(), middle["begin"].get<int64_t>())
        << middle;
  }
}

}  // namespace
}  // namespace lockstep::internal
