// `lockstep inspect snapshot` on folders: of Lockstep, of PyTorch's distributed
// checkpoint, and Hugging Face's sharded weights.
#include <torch/torch.h>

#include <filesystem>

#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/checkpoint/training_state.h"
#include "tests/checkpoint/sharded/written_folder.h"
#include "tests/cli/inspect_snapshot.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Shards = std::vector<TensorShard>;

std::string bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// Makes a row of the table like "a  b c" comparable: one blank between words.
std::string squeezed(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c != ' ' || result.empty() || result.back() != ' ') result += c;
  }
  return result;
}

class InspectFolder : public InspectSnapshotTest {
 protected:
  // The parts of two ranks: the weight is replicated, the moments are divided
  // by rows, the squares by a range of elements.
  Shards shards_of(int64_t rank) const {
    const Sizes shape{4, 3};
    const std::string state = kStatePrefix + std::string("0.weight.");
    Shards shards{
        {kModelPrefix + std::string("0.weight"), shape, Replicate{}, weight_},
        {state + "exp_avg", shape, Shard{{{2 * rank, 0}, {2, 3}}},
         moments_.narrow(0, 2 * rank, 2)},
        {state + "exp_avg_sq", shape,
         FlatShard{{5 * rank, rank == 0 ? 5 : 12}, {0, 1}},
         squares_.view(-1).slice(0, 5 * rank, rank == 0 ? 5 : 12)},
        {kGeneratorPrefix + std::to_string(rank),
         {3},
         Replicate{},
         generator_ + rank}};
    if (rank == 0) {
      shards.push_back({state + "step", {}, Replicate{}, torch::tensor(7.0F)});
    }
    return shards;
  }

  static Manifest numbers() {
    Manifest manifest;
    manifest.numbers.epochs_run = 4;
    manifest.numbers.step = 12;
    manifest.numbers.metadata = {{"run", "seventh"}};
    manifest.param_groups = {
        {.options = {{"lr", 0.1}}, .params = {"0.weight"}}};
    return manifest;
  }

  // Returns the path of a snapshot that two ranks have written.
  std::string two_ranks(const std::string& name) {
    const std::string folder = path(name);
    write_folder(folder, {shards_of(0), shards_of(1)}, numbers());
    return folder;
  }

  // Returns the path of the file of a rank that has `bytes`.
  static std::string file_with(const std::string& bytes,
                               const std::string& folder) {
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (read_file(entry.path()).find(bytes) != std::string::npos) {
        return entry.path();
      }
    }
    ADD_FAILURE() << "no file in " << folder << " has these bytes";
    return "";
  }

  // The same content as a file.
  Snapshot same_in_a_file() const {
    Snapshot snapshot;
    snapshot.model_state = {{"0.weight", weight_}};
    snapshot.optimizer_state.emplace();
    snapshot.optimizer_state->state[0] = {{"exp_avg", moments_},
                                          {"exp_avg_sq", squares_},
                                          {"step", torch::tensor(7.0F)}};
    snapshot.optimizer_state->param_groups = {
        {.options = {{"lr", 0.1}}, .params = {0}}};
    snapshot.epochs_run = 4;
    snapshot.step = 12;
    return snapshot;
  }

  // Writes a file as PyTorch's distributed checkpoint does, without manifest
  // and checksums, and returns its folder.
  std::string by_pytorch(const std::string& name,
                         std::vector<PlannedEntry> entries) {
    const std::string folder = path(name);
    fs::create_directories(folder);
    std::vector<SafetensorsEntry> places;
    json offsets = json::object();
    std::string bytes;
    for (const PlannedEntry& entry : entries) {
      const std::string more = bytes_of(entry.elements);
      places.push_back({entry.name, entry.elements.scalar_type(),
                        entry.box.sizes, bytes.size(),
                        bytes.size() + more.size()});
      offsets[entry.name] = {{"saved_offsets", entry.box.offsets}};
      bytes += more;
    }
    const std::string header = make_plain_header(
        places, {{kShardingInfo, offsets.dump()}, {"DCP_VERSION", "1.0"}}, 8);
    const uint64_t length = header.size();
    std::ofstream(folder + "/shard-00001-model-00001-of-00001.safetensors",
                  std::ios::binary)
        << std::string(reinterpret_cast<const char*>(&length), sizeof length)
        << header << bytes;
    return folder;
  }

  at::Tensor weight_ = torch::arange(12, torch::kFloat).view({4, 3});
  at::Tensor moments_ = torch::full({4, 3}, 2.0F);
  at::Tensor squares_ = torch::full({4, 3}, 0.5F);
  at::Tensor generator_ = torch::tensor({1, 2, 3}, torch::kByte);
};

TEST_F(InspectFolder, ListsWhereEveryTensorLies) {
  const std::string folder = two_ranks("a");
  const auto result = inspect({folder});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(StartsWith(folder + ": 6 tensors, 154 B, epoch 4 has "
                                        "ended, step 12, saved by 2 ranks\n"
                                        "  run: seventh\n"),
                    Not(HasSubstr("checksum")), Not(HasSubstr("norm"))));
  EXPECT_THAT(
      squeezed(result.out),
      HasSubstr("tensor shape dtype bytes shard\n"
                "0.weight [4, 3] float32 48 replicate, rank 0\n"
                "optimizer.state.0.weight.exp_avg [4, 3] float32 48 shard, "
                "ranks 0-1\n"
                "optimizer.state.0.weight.exp_avg_sq [4, 3] float32 48 flat, "
                "ranks 0-1\n"
                "optimizer.state.0.weight.step [] float32 4 replicate, rank "));
  const auto document = inspect_json({folder});
  EXPECT_EQ(document.at("path"), folder);
  EXPECT_EQ(document.at("generator_states"), 2);
  EXPECT_EQ(document.at("verified"), false);
  const auto moments = tensor_in(document, "optimizer.state.0.weight.exp_avg");
  EXPECT_EQ(moments.at("shard"),
            json({{"placement", "shard"},
                  {"ranks", {0, 1}},
                  {"files",
                   {"shard-00001-model-00001-of-00002.safetensors",
                    "shard-00002-model-00001-of-00002.safetensors"}}}));
  EXPECT_FALSE(moments.contains("checksum"));
}

TEST_F(InspectFolder, VerifiesEveryTensor) {
  const auto result = inspect({"--verify", two_ranks("a")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(squeezed(result.out),
              AllOf(HasSubstr("bytes shard checksum norm\n"),
                    HasSubstr("float32 48 shard, ranks 0-1 ok 6.9282\n"),
                    HasSubstr("\nevery checksum is right\n")));
  const auto document = inspect_json({"--verify", path("a")});
  EXPECT_EQ(document.at("verified"), true);
  EXPECT_EQ(document.at("damage"), json::array());
  for (const auto& tensor : document.at("tensors")) {
    EXPECT_EQ(tensor.at("checksum"), "ok") << tensor;
  }
}

TEST_F(InspectFolder, DamageIsNamedAndTheOtherTensorsAreVerified) {
  const std::string folder = two_ranks("a");
  const std::string moments_bytes = bytes_of(moments_.narrow(0, 2, 2));
  const std::string file = file_with(moments_bytes, folder);
  flip_bit(file, moments_bytes);
  const std::string other = file_with(bytes_of(generator_ + 1), folder);
  flip_bit(other, bytes_of(generator_ + 1));
  const auto result = inspect({"--verify", folder});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(count(result.err, "\n"), 2) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr(kHead + ("snapshot \"" + file)),
                                HasSubstr(kHead + ("snapshot \"" + other))));

  for (const char* name :
       {"optimizer.state.0.weight.exp_avg", "lockstep.generator.1"}) {
    EXPECT_THAT(result.err,
                HasSubstr(std::string("safetensors\" is damaged: tensor \"") +
                          name + "\" does not match its checksum"));
  }
  EXPECT_THAT(squeezed(result.out),
              AllOf(HasSubstr("48 shard, ranks 0-1 damaged\n"),
                    HasSubstr("48 flat, ranks 0-1 ok 1.73205\n"),
                    HasSubstr("48 replicate, rank 0 ok 22.4944\n"),
                    HasSubstr("\ndamaged in 2 places\n")));
  const auto document = inspect_json({"--verify", folder}, 1);
  const auto moments = tensor_in(document, "optimizer.state.0.weight.exp_avg");
  EXPECT_EQ(moments.at("checksum"), "damaged");
  EXPECT_TRUE(moments.at("norm").is_null());
  EXPECT_EQ(document.at("damage").size(), 2u);
  // Without --verify elements are not read.
  EXPECT_EQ(inspect({folder}).exit_code, 0);
}

TEST_F(InspectFolder, ANewestOrNamedSnapshotOfAFolderOfThemIsListed) {
  torch::nn::Linear model(2, 2);
  torch::optim::Adam optimizer(model->parameters());
  model(torch::ones({1, 2})).sum().backward();
  optimizer.step();
  TrainingState state{.model = model.ptr(), .optimizer = &optimizer};
  for (state.step = 1; state.step <= 2; ++state.step) {
    save_snapshot(path("all/"), state);
  }
  const std::string newest = path("all/000002-step-2");
  for (const char* name : {"all", "all/", "all/000002-step-2/"}) {
    const auto document = inspect_json({"--verify", path(name)});
    EXPECT_EQ(document.at("path"), newest);
    EXPECT_EQ(document.at("step"), 2);
    // Two parameters, three of each in the optimizer, a generator.
    EXPECT_EQ(document.at("tensors").size(), 9u);
    EXPECT_EQ(tensor_in(document, "optimizer.state.bias.step").at("norm"), 1.0);
  }
  EXPECT_EQ(inspect_json({path("all/latest")}).at("step"), 2);
  EXPECT_EQ(inspect_json({path("all/000001-step-1")}).at("step"), 1);

  // A file of the same run has the same tensors.
  state.step = 2;
  save_snapshot(path("same.pt"), state);
  save_snapshot(path("same.safetensors"), state);
  for (const char* name : {"same.pt", "same.safetensors"}) {
    const auto equal = inspect_json({"--diff", path(name), path("all/")});
    EXPECT_EQ(equal.at("equal_tensors"), 8) << name;
    EXPECT_EQ(equal.at("differences"), json::array()) << name;
  }
}

TEST_F(InspectFolder, AMissingFileIsOneLine) {
  const std::string folder = two_ranks("a");
  fs::remove(folder + "/shard-00002-model-00001-of-00002.safetensors");
  for (const char* option : {"--json", "--verify"}) {
    EXPECT_THAT(
        one_line_error({option, folder}, 1),
        AllOf(StartsWith(kHead + ("snapshot \"" + folder) + "\" is damaged"),
              HasSubstr("\"shard-00002-model-00001-of-00002.safetensors\" is "
                        "missing")));
  }
}

TEST_F(InspectFolder, WhatIsNoSnapshotIsOneLine) {
  fs::create_directory(path("empty"));
  EXPECT_THAT(one_line_error({path("empty")}, 1),
              HasSubstr("is a folder without snapshots"));
  const std::string folder = two_ranks("a");
  fs::remove(folder + "/" + kManifestName);
  EXPECT_THAT(one_line_error({"--verify", folder}, 1),
              HasSubstr("has no manifest.json"));
  EXPECT_THAT(one_line_error({path("none/")}, 2), HasSubstr("No such file"));
  std::ofstream(path("model.safetensors.index.json")) << "{}";
  EXPECT_THAT(one_line_error({path("model.safetensors.index.json")}, 1),
              HasSubstr("weight_map"));
}

TEST_F(InspectFolder, OneFileOfAFolderIsVerifiedByItself) {
  const std::string file = file_with(bytes_of(weight_), two_ranks("a"));
  const auto weight =
      tensor_in(inspect_json({"--verify", file}), "model.0.weight");
  EXPECT_EQ(weight.at("checksum"), "ok");
  EXPECT_FALSE(weight.contains("shard"));
  flip_bit(file, bytes_of(weight_));
  const auto result = inspect({"--verify", file});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("\"model.0.weight\" does not match"));
}

TEST_F(InspectFolder, DifferencesBetweenFoldersAreNamed) {
  const std::string a = two_ranks("a");
  EXPECT_EQ(inspect({"--diff", a, two_ranks("b")}).exit_code, 0);
  moments_ = moments_.clone();
  moments_[3][1] += 0.25;
  const auto result = inspect({"--diff", two_ranks("c"), a});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_THAT(squeezed(result.out),
              AllOf(StartsWith("A: " + a + "\nB: " + path("c") + "\n"),
                    HasSubstr("3 tensors are equal, 1 difference\n"),
                    HasSubstr("optimizer.state.0.weight.exp_avg 1 of 12 "
                              "elements differ 0.25\n")));
}

TEST_F(InspectFolder, AFolderIsComparedWithAFileByTheParametersNumber) {
  const std::string folder = two_ranks("a");
  save_snapshot_file(path("a.pt"), same_in_a_file());
  const auto equal = inspect_json({"--diff", folder, path("a.pt")});
  EXPECT_EQ(equal.at("equal_tensors"), 4);
  auto other = same_in_a_file();
  other.optimizer_state->state[0]["exp_avg"] = moments_ + 1;
  other.optimizer_state->state[1]["exp_avg"] = moments_;
  save_snapshot_file(path("b.safetensors"), other);
  // The row has the name, whichever side knows it.
  for (const auto& [first, second] :
       {std::pair(folder, path("b.safetensors")),
        std::pair(path("b.safetensors"), folder)}) {
    const auto document = inspect_json({"--diff", second, first}, 1);
    EXPECT_EQ(document.at("equal_tensors"), 3);
    ASSERT_EQ(document.at("differences").size(), 2u) << document;
    const auto& moments = document.at("differences")[0];
    EXPECT_EQ(moments.at("name"), "optimizer.state.0.weight.exp_avg");
    EXPECT_EQ(moments.at("greatest"), 1.0);
    EXPECT_EQ(document.at("differences")[1].at("name"),
              "optimizer.state.1.exp_avg");
  }
}

TEST_F(InspectFolder, ADamagedTensorCannotBeCompared) {
  const std::string a = two_ranks("a");
  const std::string b = two_ranks("b");
  flip_bit(file_with(bytes_of(weight_), b), bytes_of(weight_));
  EXPECT_THAT(one_line_error({"--diff", b, a}, 1),
              AllOf(HasSubstr("is damaged"), HasSubstr("model.0.weight")));
}

TEST_F(InspectFolder, PyTorchsFoldersHaveNoChecksums) {
  const std::string folder = by_pytorch(
      "dcp",
      {{"model.0.weight", whole_box({4, 3}), weight_},
       {"optimizer.state.0.weight.exp_avg", whole_box({4, 3}), moments_}});
  const auto result = inspect({"--verify", folder});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(squeezed(result.out),
              AllOf(HasSubstr("\n0.weight [4, 3] float32 48 rank 0 none "
                              "22.4944\n"),
                    HasSubstr("\nno tensor has a checksum\n")));
  const auto weight = tensor_in(inspect_json({folder}), "0.weight");
  EXPECT_TRUE(weight.at("shard").at("placement").is_null());

  // Folders name parameters, so both kinds of folder are compared by name.
  const auto with_ours = inspect_json({"--diff", two_ranks("ours"), folder}, 1);
  EXPECT_EQ(with_ours.at("equal_tensors"), 2);
  // A file numbers them, and this folder does not.
  save_snapshot_file(path("a.pt"), same_in_a_file());
  const auto with_file = inspect_json({"--diff", path("a.pt"), folder}, 1);
  EXPECT_EQ(with_file.at("equal_tensors"), 1);
  EXPECT_THAT(with_file.dump(), HasSubstr("\"not compared: one side names"));
  EXPECT_THAT(with_file.dump(), Not(HasSubstr("only in")));
}

TEST_F(InspectFolder, AModelAloneIsComparedWithoutItsPrefix) {
  const std::string folder =
      by_pytorch("dcp", {{"model.0.weight", whole_box({4, 3}), weight_}});
  save_tensors(path("a.pt"), {{"0.weight", weight_}});
  EXPECT_EQ(inspect_json({"--diff", path("a.pt"), folder}).at("equal_tensors"),
            1);
  // If both have the prefix, it is part of the names.
  save_tensors(path("b.pt"), {{"model.0.weight", weight_}});
  EXPECT_EQ(inspect({"--diff", path("b.pt"), folder}).exit_code, 0);
}

TEST_F(InspectFolder, HuggingFacesWeightsAreListedByFile) {
  fs::create_directory(path("hf"));
  save_tensors(path("hf/model-00001-of-00002.safetensors"),
               {{"a", weight_}, {"unused", weight_}});
  save_tensors(path("hf/model-00002-of-00002.safetensors"), {{"b", squares_}});
  std::ofstream(path("hf/model.safetensors.index.json"))
      << json{{"weight_map",
               {{"a", "model-00001-of-00002.safetensors"},
                {"b", "model-00002-of-00002.safetensors"}}}};
  for (const char* name : {"hf", "hf/model.safetensors.index.json"}) {
    const auto result = inspect({"--verify", path(name)});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(
        squeezed(result.out),
        AllOf(HasSubstr(": 2 tensors, 96 B"),
              HasSubstr("\na [4, 3] float32 48 "
                        "model-00001-of-00002.safetensors none 22.4944\n"),
              HasSubstr("\nb [4, 3] float32 48 "
                        "model-00002-of-00002.safetensors none")));
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
