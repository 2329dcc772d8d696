// Values that shards write are read in any other division, and only those.

#include "lockstep/checkpoint/sharded/tensor_reader.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/checkpoint/model_file.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/sharded/xxh3_functions.h"
#include "tests/checkpoint/sample_snapshot.h"
#include "tests/checkpoint/sharded/written_folder.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
using Shards = std::vector<TensorShard>;

at::Tensor numbered_tensor(const Sizes& shape,
                           c10::ScalarType dtype = torch::kFloat) {
  return torch::arange(numel_of(shape), torch::kLong).view(shape).to(dtype);
}

// Returns the shards of rank `index` of `count`, if `whole` is divided in this
// way.
TensorShard divided(const std::string& name, const at::Tensor& whole,
                    const std::string& how, int64_t index, int64_t count) {
  const Sizes shape = whole.sizes().vec();
  if (how == "replicate") return {name, shape, Replicate{}, whole};
  if (how == "flat") {
    // Ranges that end in the middle of rows.
    const Range range{whole.numel() * index / count,
                      whole.numel() * (index + 1) / count};
    return {name, shape, FlatShard{range, memory_order(whole)},
            whole.as_strided({range.size()}, {1}, range.begin)};
  }
  const size_t dim = how == "rows" ? 0 : shape.size() - 1;
  const Box box = chunk_box(shape, dim, index, count);
  return {name, shape, Shard{box}, narrow_to(whole, whole_box(shape), box)};
}

TEST(TensorReader, EveryDivisionIsReadInEveryOther) {
  const TemporaryFolder temporary;
  const at::Tensor whole = numbered_tensor({13, 5, 7});
  int folders = 0;
  for (const std::string saved : {"replicate", "rows", "columns", "flat"}) {
    for (const int64_t savers : {1, 3, 4}) {
      const std::string folder = temporary.file(std::to_string(folders++));
      std::vector<Shards> by_rank;
      for (int64_t rank = 0; rank < savers; ++rank) {
        by_rank.push_back({divided("w", whole, saved, rank, savers)});
      }
      write_folder(folder, by_rank);
      const TensorFiles files = TensorFiles::open_folder(folder);
      for (const std::string loaded :
           {"replicate", "rows", "columns", "flat"}) {
        for (const int64_t loaders : {1, 2, 8}) {
          for (int64_t rank = 0; rank < loaders; ++rank) {
            const TensorShard expected =
                divided("w", whole, loaded, rank, loaders);
            TensorShard target = expected;
            target.tensor = torch::full_like(expected.tensor, -1);
            TensorReader reader(files);
            reader.add(target);
            reader.verify(true);
            reader.read();
            EXPECT_TRUE(target.tensor.equal(expected.tensor))
                << saved << " by " << savers << ", " << loaded << " by "
                << loaders;
          }
        }
      }
    }
  }
}

TEST(TensorReader, OnlyThePartIsWritten) {
  const TemporaryFolder temporary;
  const std::string folder = temporary.file("a");
  const at::Tensor whole = numbered_tensor({6, 4});
  write_folder(folder, {{{"w", {6, 4}, Replicate{}, whole}}});
  const TensorFiles files = TensorFiles::open_folder(folder);
  const at::Tensor target = torch::full({6, 4}, -1.0);
  const Box box{{1, 2}, {3, 2}};
  TensorReader reader(files);
  reader.add(
      {"w", {6, 4}, Shard{box}, narrow_to(target, whole_box({6, 4}), box)});
  reader.read();
  at::Tensor expected = torch::full({6, 4}, -1.0);
  narrow_to(expected, whole_box({6, 4}), box)
      .copy_(narrow_to(whole, whole_box({6, 4}), box));
  EXPECT_TRUE(target.equal(expected));
}

TEST(TensorReader, EveryDtypeAndLayoutComesBack) {
  const TemporaryFolder temporary;
  const std::string folder = temporary.file("a");
  Shards shards;
  for (const auto dtype :
       {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16,
        torch::kLong, torch::kInt, torch::kShort, torch::kChar, torch::kByte,
        torch::kBool, torch::kComplexFloat}) {
    const std::string name = c10::toString(dtype);
    const at::Tensor values = numbered_tensor({2, 3, 4, 5}, dtype);
    const auto add = [&](const std::string& kind, const at::Tensor& tensor) {
      shards.push_back(
          {name + kind, tensor.sizes().vec(), Replicate{}, tensor});
    };
    add("", values);
    add(".scalar", values[0][0][1][1]);
    add(".empty", values.slice(1, 0, 0));
    add(".transposed", values.transpose(0, 2));
    add(".slice", values.slice(3, 1, 3));
    add(".last", values.contiguous(at::MemoryFormat::ChannelsLast));
  }
  write_folder(folder, {shards, shards});
  const TensorFiles files = TensorFiles::open_folder(folder);
  EXPECT_EQ(files.tensors().size(), shards.size());
  for (const TensorShard& shard : shards) {
    EXPECT_TRUE(same_tensor(read_tensor(files, shard.name), shard.tensor))
        << shard.name;
    // Into memory that is laid out in another way, and with another dtype.
    TensorShard target = shard;
    target.tensor = torch::zeros(shard.tensor.sizes(), torch::kComplexDouble);
    if (target.tensor.dim() == 4) {
      target.tensor = target.tensor.contiguous(at::MemoryFormat::ChannelsLast);
    }
    TensorReader reader(files);
    reader.add(target);
    reader.read();
    EXPECT_TRUE(target.tensor.equal(shard.tensor.to(torch::kComplexDouble)));
  }
}

// Several blocks of checksums, several reads; pieces with gaps between them.
TEST(TensorReader, LargeTensorsComeBack) {
  const TemporaryFolder temporary;
  const std::string folder = temporary.file("a");
  const at::Tensor whole = torch::rand({3000, 1500});  // 17 MiB
  // As without a core for the checksums, and with one.
  ::setenv("LOCAL_WORLD_SIZE", "1000000", 1);
  write_folder(folder, {{{"w", {3000, 1500}, Replicate{}, whole}}});
  const std::string alone = read_file(folder + "/" + shard_file_name(0, 0, 1));
  ::setenv("LOCAL_WORLD_SIZE", "0", 1);
  std::filesystem::remove_all(folder);
  write_folder(folder, {{{"w", {3000, 1500}, Replicate{}, whole}}});
  ::unsetenv("LOCAL_WORLD_SIZE");
  EXPECT_TRUE(alone == read_file(folder + "/" + shard_file_name(0, 0, 1)));
  const TensorFiles files = TensorFiles::open_folder(folder);
  EXPECT_EQ(files.tensors().at("w").parts.at(0).checksums.size(), 5u);
  EXPECT_TRUE(read_tensor(files, "w").equal(whole));
  for (const Box& box : {Box{{17, 3}, {2900, 10}}, Box{{17, 3}, {2900, 1400}},
                         Box{{0, 1499}, {3000, 1}}, Box{{2, 0}, {1, 1500}}}) {
    const at::Tensor target = torch::empty(box.sizes);
    TensorReader reader(files);
    reader.add({"w", {3000, 1500}, Shard{box}, target});
    reader.verify(true);
    reader.read();
    EXPECT_TRUE(target.equal(narrow_to(whole, whole_box({3000, 1500}), box)));
  }
}

TEST(TensorReader, OnlyTheBlocksThatAreNeededAreVerified) {
  const TemporaryFolder temporary;
  const std::string folder = temporary.file("a");
  write_folder(folder,
               {{{"w", {3 << 20}, Replicate{}, torch::zeros({3 << 20})}}});
  const std::string path = folder + "/" + shard_file_name(0, 0, 1);
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(-1, std::ios::end).put('\1').flush();
  const TensorFiles files = TensorFiles::open_folder(folder);
  const auto verify = [&](int64_t begin) {
    TensorReader reader(files);
    reader.add({"w", {3 << 20}, Shard{{{begin}, {1}}}, torch::empty({1})});
    reader.verify(true);
  };
  EXPECT_THROW(read_tensor(files, "w"), SnapshotError);
  EXPECT_NO_THROW(verify(0));
  EXPECT_NO_THROW(verify((2 << 20) - 1));
  EXPECT_THAT(message_of([&] { verify(2 << 20); }),
              AllOf(HasSubstr(path),
                    HasSubstr("tensor \"w\" does not match its checksum")));
}

TEST(TensorReader, WhatDoesNotFitIsNamed) {
  const TemporaryFolder temporary;
  const std::string folder = temporary.file("a");
  write_folder(folder, {{{"w", {2, 3}, Replicate{}, torch::ones({2, 3})}}});
  const TensorFiles files = TensorFiles::open_folder(folder);
  TensorReader reader(files);
  EXPECT_THAT(message_of([&] {
                reader.add({"v", {2}, Replicate{}, torch::ones({2})});
              }),
              HasSubstr("no tensor \"v\""));
  EXPECT_THAT(message_of([&] {
                reader.add({"w", {3, 2}, Replicate{}, torch::ones({3, 2})});
              }),
              HasSubstr("\"w\" of shape [2, 3], here it has [3, 2]"));
}

TEST(Checksum, IsXxh3) {
  // The xxHash project's own tests have this value for no bytes.
  EXPECT_EQ(hex_of(xxh3("")), "2d06800538d394c2");
  const std::string text(5'000'000, 'x');
  Xxh3 parts;
  for (size_t at = 0; at < text.size(); at += 999) {
    parts.add(text.data() + at, std::min<size_t>(999, text.size() - at));
  }
  EXPECT_EQ(parts.value(), xxh3(text));
  EXPECT_EQ(checksum_of(hex_of(xxh3(text))), xxh3(text));
  // Every instruction set gives the same.
  std::vector<const Xxh3Functions*> all{&kXxh3Base};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) all.push_back(&kXxh3Avx2);
#endif
  for (const Xxh3Functions* functions : all) {
    for (const size_t size : {0, 1, 16, 17, 128, 129, 240, 241, 1025, 99'999}) {
      EXPECT_EQ(functions->hash(text.data(), size), xxh3(text.data(), size));
    }
  }
  EXPECT_FALSE(checksum_of("2D06800538D394C2"));
  EXPECT_FALSE(checksum_of("2d06800538d394c"));
}

// Files of PyTorch or Hugging Face, which have no checksums of ours.
class ForeignFolder : public ::testing::Test {
 protected:
  // Writes a safetensors file with these tensors of float32, each of which
  // holds 1, 2, 3, ...
  void write(const std::string& name,
             const std::vector<std::pair<std::string, Sizes>>& tensors,
             const std::map<std::string, Sizes>& offsets = {}) const {
    std::vector<SafetensorsEntry> entries;
    std::string data;
    nlohmann::json info = nlohmann::json::object();
    for (const auto& [tensor, sizes] : tensors) {
      const auto begin = data.size();
      for (int64_t i = 0; i < numel_of(sizes); ++i) {
        const auto value = static_cast<float>(i + 1);
        data.append(reinterpret_cast<const char*>(&value), sizeof value);
      }
      entries.push_back({tensor, torch::kFloat, sizes, begin, data.size()});
    }
    for (const auto& [tensor, place] : offsets) {
      info[tensor] = {{"saved_offsets", place}};
    }
    std::map<std::string, std::string> metadata{{"format", "pt"}};
    if (!offsets.empty()) metadata["DCP_SHARDING_INFO"] = info.dump();
    const std::string header = make_plain_header(entries, metadata, 8);
    const uint64_t length = header.size();
    write_file(
        folder_.file(name),
        std::string(reinterpret_cast<const char*>(&length), 8) + header + data);
  }
  std::string open() const {
    return message_of([&] { TensorFiles::open_folder(folder_.file("")); });
  }
  const TemporaryFolder folder_;
};

TEST_F(ForeignFolder, PartsAreFoundByTheirOffsets) {
  write("a.safetensors", {{"w", {2, 2}}}, {{"w", {0, 0}}});
  write("b.safetensors", {{"w", {1, 2}}}, {{"w", {2, 0}}});
  const TensorFiles files = TensorFiles::open_folder(folder_.file(""));
  EXPECT_TRUE(files.is_distributed());
  EXPECT_TRUE(read_tensor(files, "w")
                  .equal(torch::tensor({{1.f, 2.f}, {3.f, 4.f}, {1.f, 2.f}})));
}

TEST_F(ForeignFolder, PartsThatAreNotTheWholeTensorAreRefused) {
  write("a.safetensors", {{"w", {2, 2}}}, {{"w", {0, 0}}});
  write("b.safetensors", {{"w", {1, 2}}}, {{"w", {3, 0}}});
  EXPECT_THAT(open(), AllOf(HasSubstr("tensor \"w\" cannot be put together"),
                            HasSubstr("6 of 8 elements")));
  write("b.safetensors", {{"w", {1, 2}}}, {{"w", {1, 0}}});
  EXPECT_THAT(open(), HasSubstr("two parts overlap at [1:2, 0:2]"));
  write("b.safetensors", {{"w", {2}}}, {{"w", {4}}});
  EXPECT_THAT(open(), HasSubstr("different numbers of dimensions"));
}

TEST_F(ForeignFolder, HostileOffsetsAreRefused) {
  for (const Sizes& offsets :
       {Sizes{-1, 0}, Sizes{0}, Sizes{std::numeric_limits<int64_t>::max(), 0},
        Sizes{0, 0, 0}}) {
    write("a.safetensors", {{"w", {2, 2}}}, {{"w", offsets}});
    EXPECT_THAT(open(), HasSubstr("offsets that do not fit its shape"));
  }
  write("a.safetensors", {{"w", {2, 2}}},
        {{"w", {int64_t{1} << 40, int64_t{1} << 40}}});
  EXPECT_THAT(open(), HasSubstr("its shape is too large"));
  write("a.safetensors", {{"w", {2, 2}}}, {{"v", {0, 0}}});
  EXPECT_THAT(open(), HasSubstr("its header is invalid"));
}

TEST_F(ForeignFolder, HostileChecksumsAreRefused) {
  SafetensorsHeader header;
  header.entries = {{"w", torch::kFloat, {2}, 0, 8}};
  const auto details = [&](const std::string& sums) {
    header.metadata[kShardChecksums] = sums;
    return message_of([&] { shard_details(header); });
  };
  const auto block = std::to_string(kChecksumBlock);
  const auto with = [&](const std::string& sum) {
    return R"({"block": )" + block + R"(, "tensors": {"w": ")" + sum + "\"}}";
  };
  EXPECT_EQ(details(with("0123456789abcdef")), "");
  EXPECT_THAT(details(with("0123456789abcde")), HasSubstr("too many or too"));
  EXPECT_THAT(details(with("0123456789abcdef0123456789abcdef")),
              HasSubstr("too many or too few"));
  EXPECT_THAT(details(with("0123456789ABCDEF")), HasSubstr("not a number"));
  EXPECT_THAT(details(R"({"block": 1, "tensors": {"w": "00"}})"),
              HasSubstr("blocks of another size"));
  EXPECT_NE(details(R"({"block": )" + block + R"(, "tensors": {}})"), "");
  EXPECT_NE(details("[]"), "");
  EXPECT_NE(details("{{"), "");
}

TEST_F(ForeignFolder, AnEmptyFolderSaysSo) {
  EXPECT_THAT(open(), HasSubstr("is a folder without snapshots"));
}

class HuggingFace : public ForeignFolder {
 protected:
  void SetUp() override {
    write("model-00001-of-00002.safetensors",
          {{"layer.weight", {2, 3}}, {"twice", {9}}});
    write("model-00002-of-00002.safetensors",
          {{"layer.bias", {2}}, {"twice", {4}}});
    // A file that the index does not name.
    write("consolidated.safetensors", {{"layer.weight", {2, 3}}});
    write_index(R"({"layer.weight": "model-00001-of-00002.safetensors",
                    "layer.bias": "model-00002-of-00002.safetensors",
                    "twice": "model-00002-of-00002.safetensors"})");
  }
  void write_index(const std::string& weight_map) const {
    write_file(index_,
               "{\"metadata\": {\"total_size\": 32},\n"
               "\"weight_map\": " +
                   weight_map + "}");
  }
  const std::string index_ = folder_.file("model.safetensors.index.json");
};

TEST_F(HuggingFace, IsLoadedByItsIndexOrItsFolder) {
  for (const std::string& path :
       {index_, folder_.file(""), std::string(folder_.file(".")),
        std::filesystem::path(index_).parent_path().string()}) {
    torch::nn::Linear linear(3, 2);
    const auto left = load_model(path, *linear,
                                 {.rename = {{"layer.", ""}}, .strict = false});
    EXPECT_THAT(left.unexpected_keys, ::testing::ElementsAre("twice"));
    EXPECT_TRUE(linear->weight.equal(
        torch::tensor({{1.f, 2.f, 3.f}, {4.f, 5.f, 6.f}})));
    EXPECT_TRUE(linear->bias.equal(torch::tensor({1.f, 2.f})));
  }
  EXPECT_EQ(load_tensors(index_).size(), 3u);
  EXPECT_EQ(load_tensors(index_).back().second.numel(), 4);
}

TEST_F(HuggingFace, WhatDoesNotFitIsNamedWithThePath) {
  torch::nn::Linear linear(3, 3);
  EXPECT_THAT(message_of([&] { load_model(index_, *linear); }),
              AllOf(HasSubstr(index_), HasSubstr("the snapshot lacks weight"),
                    HasSubstr("options rename, strict and convert")));
  EXPECT_THAT(message_of([&] { load_model(index_, *linear, {.key = "m"}); }),
              HasSubstr("have no entry \"m\""));
}

TEST_F(HuggingFace, AWrongIndexIsRefused) {
  const auto message = [&] {
    return message_of([&] { load_tensors(index_); });
  };
  std::filesystem::remove(folder_.file("model-00002-of-00002.safetensors"));
  EXPECT_THAT(message(), HasSubstr("names the file "
                                   "\"model-00002-of-00002.safetensors\", "
                                   "which is missing"));
  for (const char* name :
       {"../a.safetensors", "/etc/a.safetensors", "..", ""}) {
    write_index(std::string(R"({"w": ")") + name + "\"}");
    EXPECT_THAT(message(), HasSubstr("is not the name of a file beside it"));
  }
  write_index(R"({"w": "model-00001-of-00002.safetensors"})");
  EXPECT_THAT(message(), HasSubstr("has the tensor \"w\", but it does not"));
  write_file(index_, "{\"metadata\": {}}");
  EXPECT_THAT(message(), HasSubstr("it has no \"weight_map\""));
  write_file(index_, "weights");
  EXPECT_THAT(message(), HasSubstr("is not an index"));
}

TEST_F(HuggingFace, MappedWeightsAreTheFilesMemory) {
  const auto rename = Renaming{{"layer.", ""}};
  torch::nn::Linear one(3, 2);
  torch::nn::Linear two(3, 2);
  for (auto* linear : {&one, &two}) {
    load_model(index_, **linear,
               {.rename = rename, .strict = false, .mmap = true});
    EXPECT_TRUE((*linear)->weight.requires_grad());
    EXPECT_TRUE((*linear)->weight.equal(
        torch::tensor({{1.f, 2.f, 3.f}, {4.f, 5.f, 6.f}})));
  }
  // Neither the other module nor the file sees a value that one module writes.
  const torch::NoGradGuard no_grad;
  const std::string before =
      read_file(folder_.file("model-00001-of-00002.safetensors"));
  one->weight.fill_(7);
  EXPECT_EQ(two->weight[0][0].item<float>(), 1.0f);
  EXPECT_EQ(read_file(folder_.file("model-00001-of-00002.safetensors")),
            before);
  // The memory stays while a tensor uses it.
  const at::Tensor kept = two->weight;
  std::filesystem::remove_all(folder_.file(""));
  two = torch::nn::Linear(3, 2);
  EXPECT_EQ(kept[1][2].item<float>(), 6.0f);
}

TEST_F(HuggingFace, ASafetensorsFileCanBeMappedToo) {
  const std::string path = folder_.file("one.safetensors");
  write("one.safetensors", {{"weight", {2, 3}}, {"bias", {2}}});
  torch::nn::Linear linear(3, 2);
  const void* before = linear->weight.data_ptr();
  load_model(path, *linear, {.mmap = true});
  EXPECT_NE(linear->weight.data_ptr(), before);
  EXPECT_EQ(linear->bias[1].item<float>(), 2.0f);
  write_file(folder_.file("a.pt"), "PK\3\4 and so on");
  EXPECT_THAT(message_of([&] {
                load_model(folder_.file("a.pt"), *linear, {.mmap = true});
              }),
              HasSubstr("is a file of torch.save, which cannot be mapped"));
}

}  // namespace
}  // namespace lockstep::internal
