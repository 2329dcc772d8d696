// Folders of snapshots in one process.

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/model_file.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/sharded/manifest.h"
#include "lockstep/checkpoint/sharded/tensor_files.h"
#include "tests/checkpoint/sharded/sharded_run.h"
#include "tests/harness/kept_warnings.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using namespace lockstep::internal::testing;
namespace fs = std::filesystem;

class ShardedSnapshot : public ::testing::Test {
 protected:
  // Saves snapshot `number`.
  std::string save(int64_t number, const SnapshotOptions& options = {}) {
    run_.set(number);
    return save_snapshot(path_, run_.state, options);
  }
  // Loads into a fresh run.
  LoadedSnapshot load(ShardedRun& into, const std::string& path) {
    return load_snapshot(path, into.state, {.will_save = false});
  }

  // Flips a bit in every `stride`th byte of every file, one after the other.
  void expect_found(const std::string& snapshot, size_t stride) {
    for (const std::string& name : names_in(snapshot)) {
      const std::string file = snapshot + "/" + name;
      const std::string content = read_file(file);
      std::fstream stream(file,
                          std::ios::binary | std::ios::in | std::ios::out);
      const auto put = [&](size_t at, char byte) {
        stream.seekp(static_cast<std::streamoff>(at)).put(byte).flush();
      };
      for (size_t at = 0; at < content.size(); at += stride) {
        const int bit = 1 << (at % 8);
        put(at, static_cast<char>(content[at] ^ bit));
        const std::string message =
            message_of([&] { verify_snapshot(snapshot); });
        EXPECT_THAT(message, HasSubstr(file)) << "byte " << at;
        // Loading finds the same, and changes nothing.
        if (at % 101 == 0) {
          ShardedRun run;
          EXPECT_EQ(message_of([&] { load(run, snapshot + "/"); }), message);
          EXPECT_EQ(run.number(), 0);
        }
        put(at, content[at]);
        if (::testing::Test::HasFailure()) return;
      }
    }
    verify_snapshot(snapshot);
  }

  // Flips a bit in the first bytes that `content` has in a file.
  static void flip(const std::string& file, const std::string& content,
                   size_t after = 0) {
    std::string bytes = read_file(file);
    const size_t at = bytes.find(content);
    ASSERT_NE(at, std::string::npos) << content;
    bytes[at + after] ^= 1;
    write_file(file, bytes);
  }
  static std::string shard_of(const std::string& snapshot) {
    return snapshot + "/" + shard_file_name(0, 0, 1);
  }

  const TemporaryFolder temporary_;
  const std::string folder_ = temporary_.file("snapshots");
  const std::string path_ = folder_ + "/";
  ShardedRun run_;
};

TEST_F(ShardedSnapshot, EverythingComesBack) {
  run_.state.epochs_run = 4;
  run_.state.sampler_state = {{"epoch", 5}, {"seed", -1}};
  run_.state.metadata["note"] = "from \"here\", ü";
  const std::string saved = save(3);
  EXPECT_EQ(saved, folder_ + "/000001-step-3");
  ShardedRun loaded;
  const LoadedSnapshot result = load(loaded, path_);
  EXPECT_TRUE(result);
  EXPECT_EQ(result.path, saved);
  EXPECT_THAT(result.skipped, IsEmpty());
  EXPECT_EQ(loaded.number(), 3);
  EXPECT_EQ(loaded.state.epochs_run, 4);
  EXPECT_EQ(loaded.state.sampler_state, run_.state.sampler_state);
  EXPECT_EQ(loaded.state.metadata, run_.state.metadata);
  EXPECT_TRUE(
      same_optimizer(state_dict(loaded.optimizer), state_dict(run_.optimizer)));
  // As one Snapshot, and as weights.
  const Snapshot whole = load_snapshot_file(path_);
  EXPECT_TRUE(
      same_optimizer(*whole.optimizer_state, state_dict(run_.optimizer)));
  EXPECT_TRUE(same_snapshot({.model_state = whole.model_state},
                            {.model_state = state_dict(*run_.model)}));
  EXPECT_EQ(whole.step, 3);
  EXPECT_THAT(whole.generator_states, SizeIs(1));
  EXPECT_THAT(load_tensors(saved), SizeIs(whole.model_state.size()));
}

TEST_F(ShardedSnapshot, WithoutOneNothingIsLoadedAndTheFolderIsMade) {
  ShardedRun loaded;
  EXPECT_FALSE(load(loaded, path_));
  EXPECT_FALSE(fs::exists(folder_));
  const std::string deep = temporary_.file("a/b/c/");
  EXPECT_FALSE(load_snapshot(deep, loaded.state));
  EXPECT_TRUE(fs::is_directory(deep));
  EXPECT_TRUE(fs::is_empty(deep));
  EXPECT_EQ(loaded.number(), 0);
}

TEST_F(ShardedSnapshot, AFolderThatCannotBeMadeIsFoundBeforeTraining) {
  write_file(temporary_.file("file"), "");
  ShardedRun run;
  for (const std::string& path :
       {temporary_.file("file/"), temporary_.file("file/below/"),
        std::string("/proc/snapshots/")}) {
    EXPECT_THAT(message_of([&] { load_snapshot(path, run.state); }),
                AllOf(HasSubstr("no snapshot can be saved in"),
                      HasSubstr("will_save"), Not(HasSubstr("\n"))))
        << path;
  }
  EXPECT_FALSE(load(run, "/proc/snapshots/"));
}

TEST_F(ShardedSnapshot, KeepsWhatItIsToldToKeep) {
  for (int64_t step = 10; step <= 70; step += 10) {
    save(step, {.keep_last = 2, .keep_every = 30});
  }
  EXPECT_THAT(names_in(folder_), ElementsAre("000003-step-30", "000006-step-60",
                                             "000007-step-70", "latest"));
  EXPECT_EQ(fs::read_symlink(folder_ + "/latest"), "000007-step-70");
  save(80);
  EXPECT_THAT(names_in(folder_), SizeIs(5));
  save(90, {.keep_last = 1});
  EXPECT_THAT(names_in(folder_), ElementsAre("000009-step-90", "latest"));
}

// A save that is repeated after a rank was lost left one step only. Without
// counted steps all are different.
TEST_F(ShardedSnapshot, ARepeatedSaveDoesNotCountAsAnotherStep) {
  const SnapshotOptions two{.keep_last = 2};
  for (const int64_t step : {10, 20, 30, 30}) save(step, two);
  EXPECT_THAT(names_in(folder_),
              ElementsAre("000002-step-20", "000004-step-30", "latest"));
  save(30, {.keep_last = 2, .keep_every = 15});
  EXPECT_THAT(names_in(folder_), ElementsAre("000002-step-20", "000004-step-30",
                                             "000005-step-30", "latest"));
  for (int i = 0; i < 3; ++i) save(0, two);
  EXPECT_THAT(names_in(folder_),
              ElementsAre("000007-step-0", "000008-step-0", "latest"));
}

// If incomplete snapshots counted, they could push out the last whole one.
TEST_F(ShardedSnapshot, WhatIsIncompleteDoesNotCountAsKept) {
  const std::string first = save(1);
  fs::remove(shard_of(save(2)));
  fs::remove(save(3) + "/manifest.json");
  save(4, {.keep_last = 2});
  EXPECT_TRUE(fs::exists(first));
  EXPECT_THAT(names_in(folder_), SizeIs(5));
}

TEST_F(ShardedSnapshot, ASnapshotOfTheSameStepIsAnotherOne) {
  save(1);
  run_.set(1);
  run_.state.epochs_run = 9;
  EXPECT_EQ(save_snapshot(path_, run_.state), folder_ + "/000002-step-1");
  ShardedRun loaded;
  EXPECT_TRUE(load(loaded, path_));
  EXPECT_EQ(loaded.state.epochs_run, 9);
}

TEST_F(ShardedSnapshot, ADamagedOneIsSkippedAndReported) {
  const std::string first = save(1);
  const std::string second = save(2);
  const std::string third = save(3);
  // Two equal elements of the last tensors of the file, exp_avg_sq of a
  // parameter; then a manifest.
  const auto state = state_dict(run_.optimizer).state;
  const at::Tensor squares = std::get<at::Tensor>(state.at(0).at("exp_avg_sq"));
  flip(shard_of(third),
       std::string(static_cast<const char*>(squares.data_ptr()), 8), 5);
  ShardedRun loaded;
  LoadedSnapshot result = load(loaded, path_);
  EXPECT_TRUE(result);
  EXPECT_EQ(result.path, second);
  EXPECT_EQ(loaded.number(), 2);
  ASSERT_THAT(result.skipped, SizeIs(1));
  EXPECT_THAT(
      result.skipped[0],
      AllOf(HasSubstr(shard_of(third)), HasSubstr("tensor \"optimizer.state."),
            HasSubstr("exp_avg_sq\" does not match its checksum")));

  flip(second + "/manifest.json", "\"step\": 2", 8);
  result = load(loaded, path_);
  EXPECT_EQ(result.path, first);
  ASSERT_THAT(result.skipped, SizeIs(2));
  EXPECT_THAT(result.skipped[1],
              AllOf(HasSubstr(second + "/manifest.json"),
                    HasSubstr("does not match its checksum")));

  fs::remove(shard_of(first));
  loaded.set(7);
  EXPECT_THAT(message_of([&] { load(loaded, path_); }),
              AllOf(HasSubstr("has 3 snapshots, none of which can be loaded"),
                    HasSubstr(shard_of(third)), Not(HasSubstr("\n"))));
  EXPECT_EQ(loaded.number(), 7);
  // The next save has a number of its own.
  EXPECT_EQ(save(4), folder_ + "/000004-step-4");
}

TEST_F(ShardedSnapshot, OneWithoutAManifestIsNotASnapshot) {
  const std::string first = save(1);
  const std::string second = save(2);
  fs::remove(second + "/manifest.json");
  ShardedRun loaded;
  const LoadedSnapshot result = load(loaded, path_);
  EXPECT_EQ(result.path, first);
  EXPECT_THAT(result.skipped,
              ElementsAre(HasSubstr("has no manifest.json: saving it did not "
                                    "end")));
  EXPECT_THAT(message_of([&] { load(loaded, second + "/"); }),
              HasSubstr("has no manifest.json"));
  EXPECT_THROW(load_tensors(second), SnapshotError);
}

TEST_F(ShardedSnapshot, WhatIsNotDamageIsAnErrorAndNotSkipped) {
  const std::string first = save(1);
  TrainingState other{.model = torch::nn::Linear(5, 2).ptr()};
  EXPECT_THAT(
      message_of([&] { load_snapshot(path_, other, {.will_save = false}); }),
      AllOf(HasSubstr(first), HasSubstr("belongs to another model")));
  ShardedRun run;
  torch::optim::SGD sgd(run.model->parameters(), 0.1);
  run.state.optimizer = &sgd;
  EXPECT_THAT(message_of([&] { load(run, path_); }),
              HasSubstr("does not fit this SGD"));
  torch::optim::Adam half({run.model->parameters()[0]});
  run.state.optimizer = &half;
  EXPECT_THAT(message_of([&] { load(run, path_); }),
              HasSubstr("its group 0 has 0.bias, the optimizer's does not"));
  EXPECT_EQ(run.number(), 0);
  // Not even if an older one would fit.
  save_snapshot(path_, {.model = other.model, .step = 2});
  run.state.optimizer = &run.optimizer;
  EXPECT_THAT(
      message_of([&] { load(run, path_); }),
      AllOf(HasSubstr("000002-step-2"), HasSubstr("belongs to another model")));
  fs::remove_all(folder_ + "/000002-step-2");

  // A format of the future.
  std::string text = read_file(first + "/manifest.json");
  text.replace(text.find("\"format\": 1"), 11, "\"format\": 2");
  text.resize(text.rfind(",\n"));
  write_file(first + "/manifest.json",
             text + ",\n \"xxh3\": \"" + hex_of(xxh3(text)) + "\"\n}\n");
  run.state.optimizer = &run.optimizer;
  EXPECT_THAT(message_of([&] { load(run, path_); }),
              HasSubstr("its format is 2, but this version"));
}

// Fault 19.
TEST_F(ShardedSnapshot, AFlippedBitIsFoundAndItsFileNamed) {
  expect_found(save(3), 7);
}

TEST_F(ShardedSnapshot, ABitOfEachByteFlippedIsFound) {
  expect_found(save(3), 1);
}

TEST_F(ShardedSnapshot, EveryTensorIsNamedIfItIsDamaged) {
  const std::string snapshot = save(3);
  const TensorFiles files = TensorFiles::open_folder(snapshot);
  for (const auto& [name, tensor] : files.tensors()) {
    const auto& part = tensor.parts.at(0);
    const std::string path = files.file(part.file).path();
    const std::string content = read_file(path);
    std::string changed = content;
    changed[part.begin + part.bytes - 1] ^= 0x40;
    write_file(path, changed);
    EXPECT_THAT(message_of([&] { verify_snapshot(snapshot); }),
                HasSubstr("tensor \"" + name + "\" does not match"));
    write_file(path, content);
  }
}

TEST_F(ShardedSnapshot, AFileThatIsCutShortOrLongerIsFound) {
  const std::string snapshot = save(3);
  for (const std::string& name : names_in(snapshot)) {
    const std::string file = snapshot + "/" + name;
    const std::string content = read_file(file);
    for (size_t size = 0; size < content.size(); size += 1 + size / 50) {
      fs::resize_file(file, size);
      EXPECT_THAT(message_of([&] { verify_snapshot(snapshot); }),
                  HasSubstr(file))
          << size;
      write_file(file, content);
    }
    write_file(file, content + "x");
    EXPECT_THAT(message_of([&] { verify_snapshot(snapshot); }),
                HasSubstr(file));
    write_file(file, content);
  }
}

// A safetensors file beside the snapshots made load_snapshot() take that file
// for the weights to load, and ignore all snapshots.
TEST_F(ShardedSnapshot, WeightsBesideSnapshotsDoNotHideThem) {
  save(1);
  save_model(path_ + "export.safetensors", *run_.model);
  const std::string second = save(2);
  ShardedRun loaded;
  const LoadedSnapshot result = load_snapshot(path_, loaded.state);
  EXPECT_EQ(result.path, second);
  EXPECT_EQ(loaded.number(), 2);
  EXPECT_EQ(load_snapshot_file(path_).step, 2);
}

TEST_F(ShardedSnapshot, AFolderOfWeightsTakesNoSnapshots) {
  run_.set(4);
  fs::create_directory(folder_);
  save_model(path_ + "model.safetensors", *run_.model);
  ShardedRun loaded;
  const auto has_weights =
      AllOf(HasSubstr(folder_), HasSubstr("holds weights"),
            HasSubstr("another folder"), Not(HasSubstr("\n")));
  EXPECT_THAT(message_of([&] { load_snapshot(path_, loaded.state); }),
              AllOf(has_weights, HasSubstr("will_save")));
  EXPECT_THAT(message_of([&] { save(5); }), has_weights);
  EXPECT_THAT(names_in(folder_), ElementsAre("model.safetensors"));
  EXPECT_TRUE(load(loaded, path_));
  EXPECT_TRUE(loaded.model->parameters()[0].eq(4).all().item<bool>());
  // One snapshot takes none either.
  fs::remove(path_ + "model.safetensors");
  const std::string saved = save(6) + "/";
  EXPECT_THAT(message_of([&] { load_snapshot(saved, loaded.state); }),
              HasSubstr("is a snapshot itself"));
}

// A snapshot that was moved, with a link in its place, was not seen: the
// training began anew in silence.
TEST_F(ShardedSnapshot, ALinkToASnapshotIsASnapshot) {
  save(1);
  const std::string second = save(2);
  const std::string archive = temporary_.file("archive");
  fs::rename(second, archive);
  fs::create_directory_symlink(archive, second);
  ShardedRun loaded;
  EXPECT_EQ(load(loaded, path_).path, second);
  EXPECT_EQ(loaded.number(), 2);
  EXPECT_EQ(save(2), folder_ + "/000003-step-2");
  // Removing what it points to is the user's.
  save(3, {.keep_last = 1});
  EXPECT_THAT(names_in(folder_),
              ElementsAre("000002-step-2", "000004-step-3", "latest"));
  EXPECT_TRUE(fs::exists(archive + "/manifest.json"));
  fs::rename(archive, archive + "-elsewhere");
  EXPECT_EQ(load(loaded, path_).path, folder_ + "/000004-step-3");
  fs::remove_all(folder_ + "/000004-step-3");
  EXPECT_THAT(message_of([&] { load(loaded, path_); }),
              AllOf(HasSubstr(second),
                    HasSubstr("is a link to a folder that cannot be found")));
}

// Another job may make the name between the listing and the renaming.
TEST_F(ShardedSnapshot, ALinkOfTheSameNameDoesNotPreventSaving) {
  class Linked : public SaveFiles {
    void before(const char* call, const std::string& path) override {
      if (std::string_view(call) == "rename" &&
          fs::path(path).filename() == "000001-step-1") {
        fs::create_directory_symlink("elsewhere", path);
      }
    }
  };
  Linked files;
  run_.set(1);
  EXPECT_EQ(save_with(files, folder_, run_), folder_ + "/000002-step-1");
  EXPECT_TRUE(fs::is_symlink(folder_ + "/000001-step-1"));
}

// Looking whether an old snapshot is complete waited for a writer of the pipe.
TEST_F(ShardedSnapshot, APipeInThePlaceOfAManifestDoesNotHoldASave) {
  const std::string manifest = save(1) + "/manifest.json";
  fs::remove(manifest);
  ASSERT_EQ(::mkfifo(manifest.c_str(), 0600), 0);
  save(2, {.keep_last = 1});
  EXPECT_THAT(names_in(folder_),
              ElementsAre("000001-step-1", "000002-step-2", "latest"));
}

// An object whose state is tensors, by position.
struct Layers {
  NamedTensors layers{};
  NamedTensors state_dict() const { return layers; }
  void load_state_dict(const NamedTensors& state) { layers = state; }
};

std::vector<std::string> names_of(const NamedTensors& tensors) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  return names;
}

// Folders gave tensors back by name ("10" before "2"), safetensors by the size
// of their elements.
TEST_F(ShardedSnapshot, AnObjectsTensorsKeepTheirOrder) {
  Layers saved;
  for (int64_t i = 0; i < 12; ++i) {
    saved.layers.emplace_back(
        std::to_string(i),
        torch::full({1}, i, i % 2 == 0 ? torch::kFloat : torch::kDouble));
  }
  const auto expected = names_of(saved.layers);
  for (const char* name : {"s/", "s.pt", "s.safetensors", "own/"}) {
    SCOPED_TRACE(name);
    const std::string path = temporary_.file(name);
    const bool own = std::string_view(name) == "own/";
    const auto state_with = [&](Layers& layers) {
      StateItem item(layers);
      return TrainingState{.model = run_.model.ptr(),
                           .items = {{"layers", own ? per_rank(item) : item}}};
    };
    save_snapshot(path, state_with(saved));
    Layers loaded;
    TrainingState state = state_with(loaded);
    ASSERT_TRUE(load_snapshot(path, state));
    ASSERT_EQ(names_of(loaded.layers), expected);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(loaded.layers[i].second.equal(saved.layers[i].second));
    }
    const auto read =
        names_of(load_snapshot_file(path).items.at("layers").tensors);
    ASSERT_EQ(read.size(), expected.size());
    EXPECT_EQ(read[2], own ? "0.2" : "2");
    EXPECT_EQ(read[10], own ? "0.10" : "10");
  }
}

// The error of a folder did not say which item.
TEST_F(ShardedSnapshot, AnItemThatDoesNotFitIsNamed) {
  torch::nn::Linear net(2, 1);
  torch::optim::SGD optimizer(run_.model->parameters(), 0.1);
  for (const char* name : {"item/", "item.pt"}) {
    const std::string path = temporary_.file(name);
    save_snapshot(path, {.model = run_.model.ptr(), .items = {{"other", net}}});
    TrainingState state{.model = run_.model.ptr(),
                        .items = {{"other", optimizer}}};
    EXPECT_THAT(message_of([&] { load_snapshot(path, state); }),
                HasSubstr("the item \"other\" of the snapshot does not fit: it "
                          "is not the state of an optimizer"));
  }
}

// Two parameters without a name were counted once, and the state of a parameter
// went to the one before it.
TEST_F(ShardedSnapshot, ParametersWithoutANameAreCounted) {
  std::vector<at::Tensor> parameters{torch::empty({0}), torch::empty({0})};
  for (const at::Tensor& parameter : run_.model->parameters()) {
    parameter.mutable_grad() = torch::ones_like(parameter);
    parameters.push_back(parameter);
  }
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD optimizer(parameters, options);
  optimizer.step();
  const std::string path = temporary_.file("unnamed.pt");
  save_snapshot(path,
                {.model = run_.model.ptr(), .items = {{"steps", optimizer}}});
  torch::optim::SGD other(parameters, options);
  TrainingState state{.model = run_.model.ptr(), .items = {{"steps", other}}};
  EXPECT_EQ(message_of([&] { load_snapshot(path, state); }), "");
  EXPECT_TRUE(same_optimizer(state_dict(other), state_dict(optimizer)));
}

// A folder that a user had made in an old snapshot let every later save and
// resume fail.
TEST_F(ShardedSnapshot, AFolderInAnOldSnapshotIsRemovedWithIt) {
  fs::create_directories(save(1, {.keep_last = 1}) + "/plots/of/mine");
  for (const int64_t number : {2, 3}) {
    save(number, {.keep_last = 1});
    const std::string name =
        "00000" + std::to_string(number) + "-step-" + std::to_string(number);
    EXPECT_THAT(names_in(folder_), ElementsAre(name, "latest"));
  }
  ShardedRun loaded;
  EXPECT_TRUE(load_snapshot(path_, loaded.state));
  EXPECT_EQ(loaded.number(), 3);
}

// Files that cannot be removed, as those of another user.
TEST_F(ShardedSnapshot, WhatCannotBeRemovedDoesNotPreventSaving) {
  class Kept : public SaveFiles {
    void before(const char* call, const std::string& path) override {
      if (std::string_view(call) == "unlink") {
        throw std::system_error(EPERM, std::generic_category(), path);
      }
    }
  };
  Kept files;
  for (int64_t number = 1; number <= 3; ++number) {
    run_.set(number);
    EXPECT_EQ(
        message_of([&] { save_with(files, folder_, run_, {.keep_last = 1}); }),
        "");
  }
  ShardedRun loaded;
  EXPECT_TRUE(load_snapshot(path_, loaded.state));
  EXPECT_EQ(loaded.number(), 3);
}

// As in a copy of the folder whose links were followed: the snapshot existed,
// and the save failed.
TEST_F(ShardedSnapshot, ADirectoryInThePlaceOfTheLinkDoesNotPreventSaving) {
  fs::create_directories(folder_ + "/latest/inside");
  const KeptWarnings kept;
  for (int64_t number = 1; number <= 2; ++number) {
    EXPECT_EQ(message_of([&] { save(number); }), "");
  }
  EXPECT_THAT(
      kept.texts(),
      ElementsAre(HasSubstr("latest\" is a directory, so it cannot be")));
  EXPECT_THAT(names_in(folder_),
              ElementsAre("000001-step-1", "000002-step-2", "latest"));
  ShardedRun loaded;
  EXPECT_TRUE(load_snapshot(path_, loaded.state));
  EXPECT_EQ(loaded.number(), 2);
}

TEST_F(ShardedSnapshot, WithoutVerifyingDamageIsNotFound) {
  const std::string snapshot = save(3);
  const float three = 3;
  const std::string value(reinterpret_cast<const char*>(&three), 4);
  flip(shard_of(snapshot), value + value, 4);
  ShardedRun run;
  EXPECT_THROW(load(run, snapshot + "/"), SnapshotError);
  EXPECT_TRUE(load_snapshot(snapshot + "/", run.state,
                            {.will_save = false, .verify = false}));
  EXPECT_EQ(run.number(), -1);
}

TEST_F(ShardedSnapshot, MistakesAreNamed) {
  const auto message = [&](const TrainingState& state,
                           const SnapshotOptions& options = {}) {
    return message_of([&] { save_snapshot(path_, state, options); });
  };
  EXPECT_THAT(message({}), HasSubstr("TrainingState.model is not set"));
  EXPECT_THAT(message({.model = run_.model.ptr(), .step = -1}),
              HasSubstr("TrainingState.step is -1"));
  EXPECT_THAT(message(run_.state, {.keep_last = -1}),
              HasSubstr("must be 0 or more"));
  EXPECT_THAT(message(run_.state, {.keep_every = 5}),
              HasSubstr("set keep_last, too"));
  EXPECT_THAT(message({.model = run_.model.ptr(), .metadata = {{"a", "\xff"}}}),
              HasSubstr("not UTF-8"));
  torch::optim::Adam foreign({torch::zeros({4, 2})});
  EXPECT_THAT(message({.model = run_.model.ptr(), .optimizer = &foreign}),
              HasSubstr("parameter 0 of the optimizer, of shape [4, 2], is not "
                        "one of TrainingState.model"));
  torch::optim::LBFGS lbfgs(run_.model->parameters());
  EXPECT_THAT(message({.model = run_.model.ptr(), .optimizer = &lbfgs}),
              HasSubstr("cannot be saved"));
  EXPECT_FALSE(fs::exists(folder_));
  const std::string snapshot = save(1);
  EXPECT_THAT(message_of([&] { save_snapshot(snapshot + "/", run_.state); }),
              HasSubstr("is a snapshot itself"));
  EXPECT_THAT(message_of([&] {
                save_snapshot(temporary_.file("a.pt"), run_.state,
                              {.keep_last = 1});
              }),
              HasSubstr("are for folders of snapshots"));
  EXPECT_THAT(message_of([&] { save_snapshot_file(path_, {}); }),
              HasSubstr("is the name of a folder"));
}

// Tied weights have two names; what was read last counts, as with copies.
TEST_F(ShardedSnapshot, TiedWeightsComeBack) {
  struct Tied : torch::nn::Module {
    Tied() {
      one = register_module("one", torch::nn::Linear(40, 40));
      two = register_module("two", torch::nn::Linear(40, 40));
      two->named_parameters(false)["weight"].set_data(one->weight);
    }
    torch::nn::Linear one{nullptr}, two{nullptr};
  };
  const auto saved = std::make_shared<Tied>();
  save_snapshot(path_, {.model = saved});
  const auto loaded = std::make_shared<Tied>();
  TrainingState state{.model = loaded};
  EXPECT_TRUE(load_snapshot(path_, state));
  EXPECT_TRUE(loaded->one->weight.equal(saved->one->weight));
  EXPECT_EQ(loaded->one->weight.data_ptr(), loaded->two->weight.data_ptr());
  load_model(path_, *loaded, {.mmap = true});
  EXPECT_TRUE(loaded->one->weight.equal(saved->one->weight));
  EXPECT_EQ(loaded->one->weight.data_ptr(), loaded->two->weight.data_ptr());
}

// If a buffer is the first row of a parameter, only the row was loaded;
// mapped, the parameter became the row.
TEST_F(ShardedSnapshot, AViewOfAnotherTensorDoesNotHideIt) {
  const auto model_with_row = [](double value) {
    auto model = std::make_shared<torch::nn::Module>();
    const at::Tensor& weight =
        model->register_parameter("weight", torch::full({3, 2}, value));
    model->register_buffer("row", weight.detach()[0]);
    return model;
  };
  const auto expect_loaded = [](const torch::nn::Module& model) {
    for (const auto& [name, tensor] : state_dict(model)) {
      EXPECT_EQ(tensor.numel(), name == "row" ? 2 : 6);
      EXPECT_TRUE(tensor.eq(7).all().item<bool>()) << name << tensor;
    }
  };
  save_snapshot(path_, {.model = model_with_row(7)});
  TrainingState state{.model = model_with_row(0)};
  EXPECT_TRUE(load_snapshot(path_, state));
  expect_loaded(*state.model);
  const std::string file = temporary_.file("row.safetensors");
  save_model(file, *state.model);
  const auto mapped = model_with_row(0);
  load_model(file, *mapped, {.mmap = true});
  expect_loaded(*mapped);
}

// In a folder of PyTorch's, "optimizer." is the optimizer's.
TEST_F(ShardedSnapshot, AModuleNamedOptimizerIsOneLikeAnother) {
  const auto made = [](double value) {
    auto model = std::make_shared<torch::nn::Module>();
    model->register_module("optimizer", torch::nn::Linear(2, 1));
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.fill_(value);
    return model;
  };
  const std::string file = temporary_.file("named.safetensors");
  save_model(file, *made(7));
  const auto mapped = made(0);
  load_model(file, *mapped, {.mmap = true});
  EXPECT_TRUE(mapped->parameters()[0].eq(7).all().item<bool>());
}

// Threads that read do not have the mode of the one that loads.
TEST_F(ShardedSnapshot, IsConvertedIntoInferenceTensors) {
  const auto made = [](double value, at::ScalarType dtype) {
    torch::nn::Sequential model;
    for (int i = 0; i < 40; ++i) model->push_back(torch::nn::Linear(30, 30));
    model->to(dtype);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.fill_(value);
    return model;
  };
  save_snapshot(path_, {.model = made(3, torch::kBFloat16).ptr()});
  const c10::InferenceMode inference;
  auto model = made(0, torch::kFloat);
  load_model(path_, *model, {.convert = true});
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_TRUE(parameter.eq(3).all().item<bool>());
  }
}

// Values change in place: buckets and optimizers keep the memory.
TEST_F(ShardedSnapshot, LoadingWritesInPlaceAndAutogradNotices) {
  save(3);
  ShardedRun loaded;
  const at::Tensor weight = loaded.model->parameters()[0];
  const at::Tensor alias = weight.detach();
  const at::Tensor loss = weight.square().sum();
  load(loaded, path_);
  EXPECT_TRUE(alias.eq(3).all().item<bool>());
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST_F(ShardedSnapshot, TheManifestSaysWhatIsThere) {
  run_.state.sampler_state = {{"epoch", 5}};
  const std::string snapshot = save(3);
  const auto json =
      nlohmann::json::parse(read_file(snapshot + "/manifest.json"));
  EXPECT_EQ(json.at("format"), 1);
  EXPECT_EQ(json.at("world_size"), 1);
  EXPECT_EQ(json.at("step"), 3);
  EXPECT_EQ(json.at("torch_version"), TORCH_VERSION);
  EXPECT_EQ(json.at("sampler_state").at("epoch"), 5);
  const auto& group = json.at("optimizer").at("param_groups").at(0);
  EXPECT_EQ(group.at("lr"), 1e-3);
  EXPECT_EQ(group.at("params").at(1), "0.bias");
  const auto& tensor =
      json.at("tensors").at("optimizer.state.0.weight.exp_avg");
  EXPECT_EQ(tensor.at("dtype"), "F32");
  EXPECT_EQ(tensor.at("shape"), (Sizes{2, 3}));
  EXPECT_EQ(tensor.at("placement"), "replicate");
  ASSERT_EQ(json.at("files").size(), 1u);
  EXPECT_EQ(json.at("files")[0].at("name"), shard_file_name(0, 0, 1));
}

// Fault 20: a manifest that somebody made, with a right checksum.
class HostileManifest : public ShardedSnapshot {
 protected:
  void SetUp() override {
    snapshot_ = save(3);
    manifest_ = snapshot_ + "/manifest.json";
    json_ = nlohmann::json::parse(read_file(manifest_));
    json_.erase("xxh3");
  }
  // Returns what loading says if this is the manifest.
  std::string with(const nlohmann::json& json) {
    std::string text = json.dump(1);
    text.resize(text.size() - 2);
    write_file(manifest_,
               text + ",\n \"xxh3\": \"" + hex_of(xxh3(text)) + "\"\n}\n");
    ShardedRun run;
    try {
      load(run, snapshot_ + "/");
    } catch (const std::exception& error) {
      EXPECT_EQ(run.number(), 0);
      return error.what();
    }
    return "";
  }

  std::string snapshot_;
  std::string manifest_;
  nlohmann::json json_;
};

TEST_F(HostileManifest, TheOneThatWasSavedIsTaken) {
  EXPECT_EQ(with(json_), "");
}

TEST_F(HostileManifest, FilesElsewhereAreNotOpened) {
  for (const char* name : {"../a.safetensors", "/etc/passwd", "..", "", ".a"}) {
    auto json = json_;
    json["files"][0]["name"] = name;
    EXPECT_THAT(with(json), HasSubstr("not the name of a file in the same"));
  }
}

TEST_F(HostileManifest, AnyMemberOfAnotherTypeOrMissingIsRefused) {
  const std::vector<nlohmann::json> values{nullptr,
                                           true,
                                           -1,
                                           1.5,
                                           "text",
                                           nlohmann::json::array({1, "a"}),
                                           nlohmann::json::object({{"a", 1}})};
  size_t refused = 0;
  for (const auto& [name, value] : json_.items()) {
    auto without = json_;
    without.erase(name);
    for (const auto& other : values) {
      auto json = json_;
      json[name] = other;
      if (!with(json).empty()) ++refused;
    }
    if (!with(without).empty()) ++refused;
  }
  // Versions are for people; an empty list is a list.
  EXPECT_GT(refused, 40u);
  // Members of members.
  for (const char* pointer :
       {"/files/0/bytes", "/files/0/header_xxh3", "/optimizer/param_groups",
        "/optimizer/param_groups/0/params", "/optimizer/param_groups/0/betas",
        "/tensors/model.0.weight/shape", "/tensors/model.0.weight/dtype"}) {
    for (const auto& other : values) {
      auto json = json_;
      json[nlohmann::json::json_pointer(pointer)] = other;
      EXPECT_NE(with(json), "") << pointer << " " << other;
    }
  }
}

TEST_F(HostileManifest, TensorsThatAreNotInTheFilesAreNamed) {
  auto json = json_;
  json["tensors"]["model.9.weight"] = json["tensors"]["model.0.weight"];
  EXPECT_THAT(with(json), HasSubstr("tensor \"model.9.weight\" is not in its "
                                    "files as the manifest says"));
  json = json_;
  json["tensors"]["model.0.weight"]["placement"] = "shard";
  EXPECT_EQ(with(json), "");
  json["parts"]["model.0.weight"] = {{0, {0, 0}, {1, 3}}, {0, {1, 0}, {1, 3}}};
  EXPECT_THAT(with(json), HasSubstr("its tensors are not those"));
  // Without a list of parts, as in older versions.
  json = json_;
  json.erase("parts");
  EXPECT_EQ(with(json), "");
  auto other = json;
  other["tensors"].erase("model.0.weight");
  EXPECT_THAT(with(other), HasSubstr("the manifest says nothing of tensor "
                                     "\"model.0.weight\""));
  other = json;
  other["tensors"]["model.0.weight"]["shape"] = {3, 2};
  EXPECT_THAT(with(other), HasSubstr("is not in its files"));
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<at::Tensor>)>;
template <class Optimizer, class Options>
MakeOptimizer maker(const Options& options) {
  return [options](std::vector<at::Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

TEST_F(ShardedSnapshot, ResumingIsBitIdenticalWithEveryOptimizer) {
  namespace optim = torch::optim;
  const MakeOptimizer makers[] = {
      maker<optim::SGD>(optim::SGDOptions(0.1)),
      maker<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9)),
      maker<optim::Adam>(optim::AdamOptions(0.01).amsgrad(true)),
      maker<optim::AdamW>(optim::AdamWOptions(0.01)),
      maker<optim::RMSprop>(
          optim::RMSpropOptions(0.01).momentum(0.9).centered(true)),
      maker<optim::Adagrad>(optim::AdagradOptions(0.1).lr_decay(0.01))};
  const auto build = [] {
    return torch::nn::Sequential(
        torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3)),
        torch::nn::BatchNorm2d(4), torch::nn::Dropout(0.5),
        torch::nn::Flatten(), torch::nn::Linear(16, 2));
  };
  const auto train = [](auto& model, optim::Optimizer& optimizer, int from,
                        int to) {
    for (int step = from; step < to; ++step) {
      const auto data =
          torch::linspace(-1, 1 + 0.1 * step, 96).view({3, 2, 4, 4});
      optimizer.zero_grad();
      model->forward(data).square().mean().backward();
      optimizer.step();
    }
  };
  int folders = 0;
  for (const MakeOptimizer& make : makers) {
    for (const auto layout :
         {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      const std::string path = temporary_.file(std::to_string(folders++)) + "/";
      torch::manual_seed(3);
      auto model = build();
      const auto lay_out = [&](torch::nn::Sequential& net) {
        for (auto& parameter : net->parameters()) {
          if (parameter.dim() == 4) {
            parameter.set_data(parameter.detach().contiguous(layout));
          }
        }
      };
      lay_out(model);
      auto optimizer = make(model->parameters());
      train(model, *optimizer, 0, 4);
      save_snapshot(path, {.model = model.ptr(), .optimizer = optimizer.get()});
      train(model, *optimizer, 4, 8);

      torch::manual_seed(99);
      auto resumed = build();
      lay_out(resumed);
      auto fresh = make(resumed->parameters());
      TrainingState state{.model = resumed.ptr(), .optimizer = fresh.get()};
      EXPECT_TRUE(load_snapshot(path, state));
      train(resumed, *fresh, 4, 8);
      EXPECT_TRUE(same_snapshot({.model_state = state_dict(*model),
                                 .optimizer_state = state_dict(*optimizer)},
                                {.model_state = state_dict(*resumed),
                                 .optimizer_state = state_dict(*fresh)}));
    }
  }
}

}  // namespace
}  // namespace lockstep::internal
