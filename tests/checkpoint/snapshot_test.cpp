#include "lockstep/checkpoint/snapshot.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <functional>

#include "lockstep/checkpoint/model_file.h"
#include "lockstep/checkpoint/snapshot_saver.h"
#include "tests/checkpoint/sample_snapshot.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;
using namespace lockstep::internal::testing;

class SnapshotFormat : public ::testing::TestWithParam<const char*> {
 protected:
  std::string path() const {
    return folder_.file(std::string("snapshot") + GetParam());
  }
  Snapshot round_trip(const Snapshot& snapshot) const {
    save_snapshot_file(path(), snapshot);
    return load_snapshot_file(path());
  }
  TemporaryFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(, SnapshotFormat,
                         ::testing::Values(".pt", ".safetensors"),
                         [](const auto& test) {
                           return std::string(test.param).substr(1);
                         });

TEST_P(SnapshotFormat, EveryMemberComesBack) {
  const Snapshot saved = sample_snapshot();
  EXPECT_TRUE(same_snapshot(saved, round_trip(saved)));
  EXPECT_EQ(folder_.count(), 1u);  // no temporary file is left
}

TEST_P(SnapshotFormat, AnEmptySnapshotComesBack) {
  EXPECT_TRUE(same_snapshot(Snapshot(), round_trip(Snapshot())));
}

TEST_P(SnapshotFormat, SchedulersInSchedulersComeBack) {
  StateTree::Dict state;
  state.set("gamma", 0.5);
  for (int level = 0; level < 6; ++level) {
    StateTree::Dict outer;
    outer.set("_schedulers", StateTree::List{state, StateTree()});
    state = outer;
  }
  const Snapshot saved{.scheduler_state = state};
  EXPECT_TRUE(same_snapshot(saved, round_trip(saved)));
}

TEST_P(SnapshotFormat, TextOfASchedulerIsUtf8) {
  StateTree::Dict part, outer;
  part.set("mode", "\xff");
  outer.set("_schedulers", StateTree::List{part});
  EXPECT_THAT(message_of([&] { round_trip({.scheduler_state = outer}); }),
              HasSubstr("is not UTF-8"));
}

TEST_P(SnapshotFormat, EveryDtypeAndShapeComesBack) {
  Snapshot saved;
  for (const auto dtype :
       {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16,
        torch::kLong, torch::kInt, torch::kShort, torch::kChar, torch::kByte,
        torch::kBool, torch::kComplexFloat, torch::kUInt16, torch::kFloat8_e5m2,
        torch::kFloat8_e4m3fn, torch::kFloat8_e4m3fnuz,
        torch::kFloat8_e8m0fnu}) {
    const std::string name = c10::toString(dtype);
    const auto values = torch::arange(24).to(dtype).view({2, 3, 4});
    saved.model_state.emplace_back(name, values);
    saved.model_state.emplace_back(name + ".scalar", values[0][0][1]);
    saved.model_state.emplace_back(name + ".empty", values.slice(1, 0, 0));
    saved.model_state.emplace_back(name + ".strided", values.transpose(0, 2));
    saved.model_state.emplace_back(name + ".slice", values.slice(2, 1, 3));
  }
  EXPECT_TRUE(same_snapshot(saved, round_trip(saved)));
}

TEST_P(SnapshotFormat, NamesOfAnyKindComeBack) {
  Snapshot saved;
  for (const char* name : {"", "a.b", "../../etc/passwd", "ü", "a\nb", "\"{"}) {
    saved.model_state.emplace_back(name, torch::ones(1));
  }
  EXPECT_TRUE(same_snapshot(saved, round_trip(saved)));
}

TEST_P(SnapshotFormat, NonFiniteNumbersComeBack) {
  Snapshot saved;
  saved.model_state = {{"x", torch::full({2}, INFINITY)}};
  saved.optimizer_state.emplace().param_groups.push_back(
      {{{"lr", 1e-300}, {"eps", INFINITY}, {"weight_decay", -INFINITY}}, {}});
  EXPECT_TRUE(same_snapshot(saved, round_trip(saved)));
}

TEST_P(SnapshotFormat, AliasesOfOneTensorAreEqualAfterwards) {
  Snapshot saved;
  const auto tied = torch::randn({3, 3});
  saved.model_state = {{"a", tied}, {"b", tied}, {"c", tied.t()}};
  EXPECT_TRUE(same_snapshot(saved, round_trip(saved)));
}

TEST_P(SnapshotFormat, TheDigestTellsContentsApart) {
  Snapshot saved = sample_snapshot();
  const uint64_t first = round_trip(saved).digest;
  EXPECT_EQ(round_trip(saved).digest, first);
  saved.step += 1;
  EXPECT_NE(round_trip(saved).digest, first);
}

TEST_P(SnapshotFormat, TwoEqualNamesAreRefused) {
  Snapshot saved;
  saved.model_state = {{"a", torch::ones(1)}, {"a", torch::ones(1)}};
  EXPECT_THROW(save_snapshot_file(path(), saved), std::invalid_argument);
  EXPECT_EQ(folder_.count(), 0u);
}

// The errors were LibTorch's, without the name of the tensor.
TEST_P(SnapshotFormat, ATensorWithoutValuesIsRefusedByName) {
  for (const auto& [tensor, words] :
       {std::pair(torch::Tensor(), "is undefined"),
        std::pair(torch::eye(2).to_sparse(), "is not dense"),
        std::pair(torch::empty(2, torch::kMeta), "has no values")}) {
    const NamedTensors tensors{{"good", torch::ones(1)}, {"bad", tensor}};
    const auto refused = ThrowsMessage<std::invalid_argument>(
        AllOf(HasSubstr("\"bad\""), HasSubstr(words)));
    EXPECT_THAT([&] { save_tensors(path(), tensors); }, refused);
    Snapshot saved;
    saved.model_state = tensors;
    EXPECT_THAT([&] { save_snapshot_file(path(), saved); }, refused);
    saved.model_state.clear();
    saved.items["item"] = {.tensors = tensors};
    EXPECT_THAT([&] { save_snapshot_file(path(), saved); }, refused);
  }
  EXPECT_EQ(folder_.count(), 0u);
}

TEST_P(SnapshotFormat, TextThatIsNotUtf8IsRefused) {
  Snapshot saved;
  saved.metadata["note"] = "\xff";
  EXPECT_THROW(save_snapshot_file(path(), saved), std::invalid_argument);
  EXPECT_EQ(folder_.count(), 0u);
}

// Was saved, and loading it failed.
TEST_P(SnapshotFormat, ASchedulerThatIsNestedTooDeeplyIsNotSaved) {
  bool any_saved = false;
  for (int levels = 24; levels <= 40; ++levels) {
    StateTree::Dict state;
    StateTree nested = StateTree::Counter{{1, 2}};
    for (int level = 0; level < levels; ++level) {
      nested = StateTree::List{nested};
    }
    state.set("nested", nested);
    const Snapshot saved{.scheduler_state = state};
    try {
      save_snapshot_file(path(), saved);
    } catch (const std::invalid_argument& error) {
      EXPECT_THAT(error.what(), HasSubstr("nested"));
      EXPECT_TRUE(any_saved);
      continue;
    }
    any_saved = true;
    EXPECT_LT(levels, 40);
    EXPECT_TRUE(same_snapshot(saved, load_snapshot_file(path()))) << levels;
  }
}

// JSON has no other way to write a Counter than as an object with integers as
// names, and none for what is not finite, so these came back as something else.
TEST(Snapshot, ASchedulerThatSafetensorsWouldChangeIsRefused) {
  const TemporaryFolder folder;
  const auto refusal_of = [&](const StateTree& value) {
    StateTree::Dict outer;
    outer.set("by_group", StateTree::List{value});
    const Snapshot saved{.scheduler_state = outer};
    const std::string pt = folder.file("a.pt");
    save_snapshot_file(pt, saved);
    EXPECT_TRUE(same_snapshot(saved, load_snapshot_file(pt)));
    try {
      save_snapshot_file(folder.file("a.safetensors"), saved);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  StateTree::Dict integers;
  integers.set("0", 0.5);
  integers.set("1", 0.25);
  EXPECT_THAT(refusal_of(integers), AllOf(HasSubstr("\"0\""), HasSubstr(".pt"),
                                          ::testing::Not(HasSubstr("\n"))));
  for (const char* text : {"nan", "inf", "-inf"}) {
    EXPECT_THAT(refusal_of(text),
                AllOf(HasSubstr("\"" + std::string(text)), HasSubstr(".pt")));
  }
}

// Was saved as .pt, and loading it failed; of safetensors the advice was to
// name it .pt, which holds less.
TEST(Snapshot, MoreTextThanAFileHoldsIsRefused) {
  const TemporaryFolder folder;
  for (const auto& [name, limit, bytes] :
       {std::tuple("a.pt", "67108864", size_t{64} << 20),
        std::tuple("a.safetensors", "100,000,000", size_t{100'000'000})}) {
    Snapshot snapshot;
    snapshot.metadata["log"] = std::string(bytes, 'x');
    EXPECT_THAT(
        message_of([&] { save_snapshot_file(folder.file(name), snapshot); }),
        AllOf(HasSubstr(limit), HasSubstr("in a file of its own")));
  }
  EXPECT_EQ(folder.count(), 0u);
}

TEST(Snapshot, ADtypeThatAFormatLacksIsNamed) {
  const TemporaryFolder folder;
  Snapshot saved;
  saved.model_state = {{"a", torch::zeros({1}, torch::kComplexDouble)}};
  EXPECT_THAT(message_of([&] {
                save_snapshot_file(folder.file("a.safetensors"), saved);
              }),
              HasSubstr("ComplexDouble cannot be saved as safetensors"));
  save_snapshot_file(folder.file("a.pt"), saved);
}

// Such a file could not be read.
TEST(Snapshot, TensorsOfOneNameAreRefusedInSafetensors) {
  const TemporaryFolder folder;
  const std::string path = folder.file("twice.safetensors");
  Snapshot snapshot;
  snapshot.items["seen"].tensors = {{"one", at::ones({2})},
                                    {"one", at::zeros({2})}};
  EXPECT_THAT(message_of([&] { save_snapshot_file(path, snapshot); }),
              HasSubstr("two tensors of the snapshot are named "
                        "\"lockstep.items.seen.one\""));
  snapshot.items = {{"a.b", {.tensors = {{"one", at::ones({2})}}}}};
  EXPECT_THAT(message_of([&] { save_snapshot_file(path, snapshot); }),
              HasSubstr("the item \"a.b\" has a dot in its name"));
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Snapshot, AReservedNameIsRefusedInSafetensors) {
  const TemporaryFolder folder;
  Snapshot saved;
  saved.model_state = {{"lockstep.a", torch::ones(1)}};
  EXPECT_THAT(message_of([&] {
                save_snapshot_file(folder.file("a.safetensors"), saved);
              }),
              HasSubstr("reserved"));
}

// save_snapshot() and save_model() disagreed on "x.pth", and "x.bin" was
// written in either format.
TEST(Snapshot, EveryFunctionReadsAPathByOneRule) {
  const TemporaryFolder folder;
  torch::nn::Linear model(2, 2);
  TrainingState state{.model = model.ptr()};
  using Function = std::function<void(const std::string&)>;
  const Function files[] = {
      [&](const std::string& path) { save_model(path, *model); },
      [&](const std::string& path) { save_tensors(path, state_dict(*model)); },
      [&](const std::string& path) { save_snapshot_file(path, {}); },
  };
  const Function any[] = {
      [&](const std::string& path) { save_snapshot(path, state); },
      [&](const std::string& path) { SnapshotSaver(path, state).finish(); },
      [&](const std::string& path) { load_snapshot(path, state); },
  };
  size_t made = 0;
  const auto name = [&](const char* extension) {
    return folder.file(std::to_string(made++) + extension);
  };
  for (const auto* list : {&files, &any}) {
    for (const Function& function : *list) {
      for (const char* bad : {".bin", ".ckpt", ".PT", ".5"}) {
        EXPECT_THAT(message_of([&] { function(name(bad)); }),
                    AllOf(HasSubstr(".pt or .pth"), HasSubstr(".safetensors"),
                          HasSubstr("a folder of snapshots ends in \"/\"")));
      }
      for (const char* good : {".pt", ".pth"}) {
        const std::string path = name(good);
        function(path);
        if (std::filesystem::exists(path)) {
          EXPECT_THAT(read_file(path), StartsWith("PK\3\4")) << path;
        }
      }
      const std::string path = name(".safetensors");
      function(path);
      if (std::filesystem::exists(path)) {
        EXPECT_EQ(read_file(path)[8], '{') << path;
      }
    }
  }
  for (const Function& function : files) {
    for (const std::string& path : {name(""), name("/"), folder.file("")}) {
      EXPECT_THAT(message_of([&] { function(path); }),
                  HasSubstr("is the name of a folder"));
    }
  }
  std::filesystem::create_directory(folder.file("run.v2"));
  for (const Function& function : any) {
    for (const std::string& path :
         {name(""), name("/"), folder.file("run.v2"), name(".5/")}) {
      function(path);
      EXPECT_TRUE(std::filesystem::is_directory(path)) << path;
    }
  }
  // A file that is only read may have any name.
  const std::string odd = folder.file("pytorch_model.bin");
  save_model(folder.file("a.pt"), *model);
  std::filesystem::rename(folder.file("a.pt"), odd);
  load_model(odd, *model);
  EXPECT_TRUE(load_snapshot(odd, state, {.will_save = false}));
  EXPECT_THAT(message_of([&] { load_snapshot(odd, state); }),
              HasSubstr(".pt or .pth"));
}

TEST(Snapshot, TheFormatIsToldByTheContentOfAFile) {
  const TemporaryFolder folder;
  save_snapshot_file(folder.file("a.pt"), sample_snapshot());
  std::filesystem::rename(folder.file("a.pt"), folder.file("a.safetensors"));
  EXPECT_TRUE(same_snapshot(load_snapshot_file(folder.file("a.safetensors")),
                            sample_snapshot()));
}

}  // namespace
}  // namespace lockstep::internal
