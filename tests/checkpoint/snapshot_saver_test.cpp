// SnapshotSaver in one process; tests/checkpoint/saver_world_test.cpp has
// ranks.
#include "lockstep/checkpoint/snapshot_saver.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <optional>
#include <thread>
#include <vector>

#include "lockstep/checkpoint/staged_copy.h"
#include "tests/checkpoint/sharded/sharded_run.h"
#include "tests/harness/in_child.h"
#include "tests/harness/message_of.h"
#include "tests/harness/temporary_folder.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using namespace lockstep::internal::testing;
using std::chrono::milliseconds;

// Returns the number of the snapshot that is loaded; -1 if there is none.
int64_t number_in(const std::string& path) {
  ShardedRun loaded;
  if (!load_snapshot(path, loaded.state)) return -1;
  return loaded.number();
}

const std::vector<const char*> kPaths{"folder/", "file.pt", "file.safetensors"};

TEST(SnapshotSaver, WhatIsSavedIsWhatWasThereWhenSaveReturned) {
  for (const bool in_background : {true, false}) {
    for (const char* name : kPaths) {
      SCOPED_TRACE(name);
      const TemporaryFolder folder;
      ShardedRun run;
      SnapshotSaver saver(folder.file(name), run.state,
                          {.in_background = in_background});
      for (const int64_t number : {1, 2, 5}) {
        run.set(number);
        saver.save();
        run.set(number + 100);
        saver.wait();
        EXPECT_EQ(number_in(folder.file(name)), number);
      }
    }
  }
}

TEST(SnapshotSaver, TheCopyCanBeMadeWhileTheModelIsOnlyRead) {
  for (const char* name : kPaths) {
    SCOPED_TRACE(name);
    const TemporaryFolder folder;
    ShardedRun run;
    SnapshotSaver saver(folder.file(name), run.state, {.overlap_copy = true});
    for (const int64_t number : {1, 2, 5}) {
      run.set(number);
      saver.save();
      for (const auto& parameter : run.model->parameters()) {
        EXPECT_EQ(parameter.min().item<double>(), number);
      }
      saver.wait_for_copy();
      run.set(number + 100);
      saver.wait_for_copy();
      saver.wait();
      EXPECT_EQ(number_in(folder.file(name)), number);
    }
    saver.wait_for_copy();
  }
}

// A save of tensors that are given.
class SaveOfTensors final : public Save {
 public:
  explicit SaveOfTensors(std::vector<at::Tensor> tensors)
      : tensors_(std::move(tensors)) {}
  std::vector<TensorToWrite> tensors() override {
    std::vector<TensorToWrite> all;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      all.push_back({"t" + std::to_string(i), &tensors_[i], false});
    }
    return all;
  }
  void write() override {}
  std::string commit(const Ranks&) override { return {}; }

  std::vector<at::Tensor> tensors_;
};

std::vector<at::Tensor> tensors_of_all_kinds() {
  const auto numbers = torch::arange(240).view({4, 5, 12});
  return {torch::arange(3'000'000).to(at::kFloat),  // several pieces
          numbers.transpose(0, 2),                  // dense, permuted
          numbers.narrow(2, 3, 4),                  // gaps
          torch::ones({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
          torch::tensor(7, at::kShort),
          torch::tensor({true, false, true}),
          torch::empty({0, 3}),
          torch::rand({5}, at::kComplexFloat).conj(),
          torch::arange(10).to(at::kBFloat16).slice(0, 3, 8),
          torch::ones({1}).expand({6})};
}

// A forward changes the statistics of batch norms while the copy is made.
TEST(SnapshotSaver, ForwardMayChangeBuffersWhileTheCopyIsMade) {
  const TemporaryFolder folder;
  for (const char* name : kPaths) {
    SCOPED_TRACE(name);
    ShardedRun run;
    std::vector<SavedSnapshot> results;
    SnapshotSaver saver(
        folder.file(name), run.state,
        {.on_saved = [&](const auto& saved) { results.push_back(saved); },
         .overlap_copy = true});
    run.set(1);
    saver.save();
    run.model->forward(torch::rand({4, 3}) + 5);
    saver.wait_for_copy();
    saver.wait();
    ASSERT_EQ(results.size(), 1u);
    EXPECT_EQ(results[0].error, "");
    ShardedRun loaded;
    ASSERT_TRUE(load_snapshot(folder.file(name), loaded.state));
    const auto buffers = loaded.model->named_buffers();
    EXPECT_EQ(buffers["1.num_batches_tracked"].item<int64_t>(), 0);
    EXPECT_EQ(buffers["1.running_mean"].abs().max().item<float>(), 0);
  }
}

// As in a file that save_snapshot() writes.
TEST(StagedCopy, TensorsThatAreTheSameMemoryShareACopy) {
  const at::Tensor weight = torch::rand({30, 30});
  SaveOfTensors save({weight, weight.view({30, 30}), weight.t()});
  StagedCopy copy;
  copy.begin(save);
  copy.copy();
  EXPECT_EQ(save.tensors_[0].data_ptr(), save.tensors_[1].data_ptr());
  EXPECT_TRUE(torch::equal(save.tensors_[0], weight));
  EXPECT_TRUE(torch::equal(save.tensors_[2], weight.t()));
}

// A weight that a model has under two names was in a file twice if it was not
// contiguous, and in one that is written in the background also if one name has
// another shape.
TEST(SnapshotSaver, TiedWeightsAreInAFileOnce) {
  const at::Tensor weight = torch::rand({16, 16, 8, 8});
  const at::Tensor channels_last =
      torch::rand({16, 16, 8, 8}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor with_gaps = torch::rand({128, 256}).narrow(1, 0, 128);
  const std::vector<std::pair<at::Tensor, at::Tensor>> all{
      {weight, weight},
      {weight, weight.view({16, 16, 8, 8})},
      {channels_last, channels_last},
      {with_gaps, with_gaps},
      {weight, weight.view({256, 64})}};  // which safetensors cannot share
  const TemporaryFolder folder;
  for (size_t i = 0; i < all.size(); ++i) {
    for (const char* name : {"a.pt", "a.safetensors"}) {
      if (i == 4 && name == std::string("a.safetensors")) continue;
      for (const bool in_background : {true, false}) {
        SCOPED_TRACE(std::string(name) + std::to_string(i));
        const auto model = std::make_shared<torch::nn::Module>();
        model->register_parameter("first", all[i].first);
        model->register_buffer("second", all[i].second);
        const TrainingState state{.model = model};
        SnapshotSaver(folder.file(name), state,
                      {.in_background = in_background})
            .finish();
        EXPECT_LT(std::filesystem::file_size(folder.file(name)),
                  weight.nbytes() + weight.nbytes() / 2);
        for (const auto& [key, tensor] :
             load_snapshot_file(folder.file(name)).model_state) {
          EXPECT_TRUE(torch::equal(
              tensor, key == "first" ? all[i].first : all[i].second));
        }
      }
    }
  }
}

TEST(StagedCopy, HasTheValuesOfAllKindsOfTensors) {
  StagedCopy copy;
  for (int round = 0; round < 3; ++round) {
    const auto originals = tensors_of_all_kinds();
    std::vector<at::Tensor> expected;
    for (const auto& original : originals) expected.push_back(original.clone());
    SaveOfTensors save(originals);
    copy.begin(save);
    {
      std::vector<std::jthread> helpers;
      for (int i = 0; i < round; ++i) {
        helpers.emplace_back([&copy] { copy.copy(); });
      }
      copy.copy();
      for (size_t i = 0; i < originals.size(); ++i) {
        at::Tensor changed = originals[i];
        if (i != 9) changed.zero_();
      }
    }
    for (size_t i = 0; i < originals.size(); ++i) {
      EXPECT_TRUE(torch::equal(save.tensors_[i], expected[i])) << i;
      EXPECT_EQ(save.tensors_[i].dtype(), expected[i].dtype()) << i;
      EXPECT_FALSE(save.tensors_[i].is_alias_of(originals[i]) &&
                   originals[i].numel() > 0)
          << i;
    }
  }
}

TEST(StagedCopy, AChangeBeforeTheCopyIsMadeIsFound) {
  StagedCopy copy;
  const at::Tensor first = torch::ones({5});
  at::Tensor second = torch::ones({700'000});
  SaveOfTensors save({first, second.view({700, 1000})});
  copy.begin(save);
  second.add_(1);
  EXPECT_THAT(message_of([&] { copy.copy(); }),
              ::testing::AllOf(HasSubstr("\"t1\" was changed"),
                               HasSubstr("wait_for_copy()")));
  // Every other thread hears the same.
  EXPECT_THAT(message_of([&] { copy.copy(); }), HasSubstr("\"t1\""));
  // A change after the first copy() is none.
  SaveOfTensors again({first, second});
  copy.begin(again);
  copy.copy();
  second.add_(1);
  EXPECT_EQ(message_of([&] { copy.copy(); }), "");
  EXPECT_EQ(again.tensors_[1].min().item<float>(), 2);
}

// The optimizers of LibTorch and of Lockstep count as changes.
TEST(StagedCopy, AnOptimizersStepIsAChange) {
  ShardedRun run;
  run.set(1);
  const TemporaryFolder folder;
  SaveFiles files;
  const Ranks alone(nullptr);
  const auto save = begin_save(folder.file("a/"), run.state, {}, alone, files);
  StagedCopy copy;
  copy.begin(*save);
  run.optimizer.step();
  EXPECT_THAT(message_of([&] { copy.copy(); }), HasSubstr("was changed"));
}

TEST(SnapshotSaver, ItIsDueAtMultiplesOfSteps) {
  const TemporaryFolder folder;
  ShardedRun run;
  run.state.step = 7;  // resumed there
  for (const bool with_signals : {true, false}) {
    SnapshotSaverOptions options{.every_steps = 5};
    if (!with_signals) options.stop_signals = {};
    run.state.step = 7;
    SnapshotSaver saver(folder.file("a/"), run.state, options);
    std::vector<int64_t> due;
    for (const int64_t step : {7, 8, 9, 10, 10, 11, 14, 16, 30, 31}) {
      run.state.step = step;
      if (saver.is_due()) due.push_back(step);
    }
    EXPECT_THAT(due, ElementsAre(10, 16, 30));
    EXPECT_FALSE(saver.stop_requested());
  }
}

TEST(SnapshotSaver, ItIsDueWhenTheTimeIsOver) {
  const TemporaryFolder folder;
  ShardedRun run;
  SnapshotSaver never(folder.file("a/"), run.state,
                      {.every = std::chrono::hours(10)});
  SnapshotSaver saver(folder.file("a/"), run.state,
                      {.every = milliseconds(30)});
  for (int round = 0; round < 2; ++round) {
    // Not at once: the time begins with each save.
    std::this_thread::sleep_for(milliseconds(40));
    EXPECT_TRUE(saver.is_due());
    EXPECT_FALSE(never.is_due());
    saver.save();
    saver.wait();
  }
}

// Runs `test` in a process of its own, because a process that was told to stop
// stays told.
template <typename Test>
void run_apart(const Test& test) {
  EXPECT_EQ(in_child([&] {
              test();
              return ::testing::Test::HasFailure() ? 1 : 0;
            }),
            0);
}

TEST(SnapshotSaver, ASignalAsksForASaveAndForTheEnd) {
  const TemporaryFolder folder;
  const auto test = [&](int signal) {
    {
      ShardedRun run;
      SnapshotSaver saver(folder.file("a/"), run.state, {});
      EXPECT_FALSE(saver.is_due());
      ::raise(signal);
      EXPECT_FALSE(saver.stop_requested());  // the ranks have not agreed
      EXPECT_TRUE(saver.is_due());
      EXPECT_TRUE(saver.stop_requested());
      EXPECT_FALSE(saver.is_due());
      EXPECT_TRUE(saver.stop_requested());
      // Another one of the same process is told, too.
      SnapshotSaver other(folder.file("b/"), run.state, {});
      EXPECT_TRUE(other.is_due());
    }
    // The signal has its old effect, but the process stays told: it may have
    // come after the last is_due() of a saver that is no more.
    ShardedRun run;
    EXPECT_EQ(::signal(signal, SIG_DFL), SIG_DFL);
    {
      SnapshotSaver next(folder.file("a/"), run.state, {});
      EXPECT_TRUE(next.is_due());
      EXPECT_TRUE(next.stop_requested());
      // Not that it was told by other signals.
      SnapshotSaver other(folder.file("b/"), run.state,
                          {.stop_signals = {SIGINT}});
      EXPECT_FALSE(other.is_due());
    }
  };
  for (const int signal : {SIGTERM, SIGUSR2}) {
    run_apart([&] { test(signal); });
  }
}

TEST(SnapshotSaver, SaversThatShareASignalGiveItBackTogether) {
  const TemporaryFolder folder;
  const auto test = [&](bool first_ends_first) {
    ShardedRun run;
    auto first = std::make_unique<SnapshotSaver>(folder.file("a/"), run.state);
    auto second = std::make_unique<SnapshotSaver>(folder.file("b/"), run.state);
    auto& ends = first_ends_first ? first : second;
    auto& stays = first_ends_first ? second : first;
    ends.reset();
    ::raise(SIGTERM);
    EXPECT_TRUE(stays->is_due());
    stays.reset();
    EXPECT_EQ(::signal(SIGTERM, SIG_DFL), SIG_DFL);
  };
  for (const bool first_ends_first : {true, false}) {
    run_apart([&] { test(first_ends_first); });
  }
}

int own_signals = 0;

TEST(SnapshotSaver, TheProgramsOwnHandlersAreLeftAlone) {
  const TemporaryFolder folder;
  ShardedRun run;
  const auto own = [](int) { ++own_signals; };
  ::signal(SIGTERM, own);
  ::signal(SIGUSR2, SIG_IGN);
  {
    SnapshotSaver saver(folder.file("a/"), run.state, {});
    ::raise(SIGTERM);
    ::raise(SIGUSR2);
    EXPECT_FALSE(saver.is_due());
  }
  EXPECT_EQ(own_signals, 1);
  EXPECT_EQ(::signal(SIGUSR2, SIG_DFL), SIG_IGN);
  EXPECT_EQ(::signal(SIGTERM, SIG_DFL), static_cast<sighandler_t>(own));
  // Without signals, none is noticed.
  ASSERT_EQ(in_child([&] {
              SnapshotSaver saver(folder.file("a/"), run.state,
                                  {.stop_signals = {SIGINT}});
              ::raise(SIGTERM);
              return 0;
            }),
            -1);
}

TEST(SnapshotSaver, AFailedSaveIsToldAndTheNextOneTriesAgain) {
  for (const bool in_background : {true, false}) {
    const TemporaryFolder folder;
    folder.write("a", "a file where the folder should be");
    ShardedRun run;
    std::vector<SavedSnapshot> results;
    SnapshotSaver saver(
        folder.file("a/"), run.state,
        {.on_saved = [&](const auto& saved) { results.push_back(saved); },
         .in_background = in_background});
    run.set(3);
    saver.save();
    saver.wait();
    ASSERT_EQ(results.size(), 1u);
    EXPECT_EQ(results[0].path, "");
    EXPECT_THAT(results[0].error, HasSubstr(folder.file("a")));
    EXPECT_EQ(results[0].step, 3);
    // It is not saved yet, so finish() tries again.
    EXPECT_THAT(message_of([&] { saver.finish(); }),
                HasSubstr(folder.file("a")));
    std::filesystem::remove(folder.file("a"));
    saver.finish();
    ASSERT_EQ(results.size(), 3u);
    EXPECT_EQ(results[2].error, "");
    EXPECT_EQ(results[2].path, folder.file("a/000001-step-3"));
    EXPECT_GT(results[2].total.count(), 0);
    EXPECT_GT(results[2].blocked.count(), 0);
    EXPECT_EQ(number_in(folder.file("a/")), 3);
    // Now it is saved.
    saver.finish();
    EXPECT_EQ(results.size(), 3u);
  }
}

// A limit on the size of files stands for a full disk: mkdir() and open() work,
// and write() fails, in the thread.
TEST(SnapshotSaver, OnAFullDiskTheOldSnapshotStaysAndTrainingGoesOn) {
  const TemporaryFolder folder;
  for (const char* name : kPaths) {
    EXPECT_EQ(
        in_child([&] {
          ShardedRun run;
          std::vector<SavedSnapshot> results;
          SnapshotSaver saver(folder.file(name), run.state,
                              {.on_saved = [&](const auto& saved) {
                                results.push_back(saved);
                              }});
          run.set(1);
          saver.save();
          saver.wait();
          ::signal(SIGXFSZ, SIG_IGN);
          struct rlimit limit {};
          ::getrlimit(RLIMIT_FSIZE, &limit);
          const auto before = limit.rlim_cur;
          limit.rlim_cur = 100;
          ::setrlimit(RLIMIT_FSIZE, &limit);
          run.set(2);
          saver.save();
          saver.wait();
          if (results.size() != 2 || !results[0].error.empty() ||
              results[1].error.find("File too large") == std::string::npos) {
            return 1;
          }
          if (number_in(folder.file(name)) != 1) return 2;
          limit.rlim_cur = before;
          ::setrlimit(RLIMIT_FSIZE, &limit);
          run.set(3);
          saver.save();
          saver.wait();
          return number_in(folder.file(name)) == 3 ? 0 : 3;
        }),
        0)
        << name;
  }
  // No temporary file or folder is left.
  EXPECT_THAT(names_in(folder.file("folder")),
              ElementsAre("000001-step-1", "000002-step-3", "latest"));
  EXPECT_EQ(folder.count(), kPaths.size());
}

TEST(SnapshotSaver, MistakesAreThrown) {
  const TemporaryFolder folder;
  ShardedRun run;
  const auto message = [&](const SnapshotSaverOptions& options) {
    return message_of(
        [&] { SnapshotSaver saver(folder.file("a/"), run.state, options); });
  };
  EXPECT_THAT(message({.every_steps = -1}), HasSubstr("every_steps is -1"));
  EXPECT_THAT(message({.every = milliseconds(0)}), HasSubstr("every is 0 ms"));
  EXPECT_THAT(message({.stop_signals = {SIGKILL}}), HasSubstr("has 9"));
  EXPECT_THAT(message({.stop_signals = {12345}}), HasSubstr("has 12345"));
  EXPECT_THAT(message({.stop_signals = {SIGSEGV}}), HasSubstr("has 11"));
  EXPECT_THAT(message({.keep_last = -1}), HasSubstr("keep_last"));
  EXPECT_THAT(message({.in_background = false, .overlap_copy = true}),
              HasSubstr("needs in_background"));
}

// An object whose state is what a test gives.
struct StateObject {
  ItemState state_dict() const { return *held; }
  void load_state_dict(const ItemState&) {}
  ItemState* held;
};

// A scheduler whose state no format holds.
struct NestedSchedule : ResumableScheduler {
  StateTree state_dict() const override {
    StateTree nested = int64_t{1};
    for (int i = 0; i < 50; ++i) nested = StateTree::List{nested};
    StateTree::Dict state;
    state.set("nested", nested);
    return state;
  }
  std::function<void()> prepare_load(const StateTree&) override { return {}; }
};

// These errors came from the first save or finish(), perhaps hours later.
TEST(SnapshotSaver, WhatCannotBeSavedIsSaidBeforeTraining) {
  const TemporaryFolder folder;
  // Returns what is wrong, and expects the saver, a load that will be followed
  // by saves, and a save to say so.
  const auto before_training = [&](const std::string& name, TrainingState state,
                                   const SnapshotSaverOptions& options = {}) {
    const std::string path = folder.file(name);
    return message_of([&] { SnapshotSaver saver(path, state, options); });
  };
  const auto message = [&](const std::string& name, TrainingState state,
                           const SnapshotSaverOptions& options = {}) {
    const std::string path = folder.file(name);
    const std::string told = before_training(name, state, options);
    EXPECT_EQ(message_of([&] {
                save_snapshot(path, state,
                              {.keep_last = options.keep_last,
                               .keep_every = options.keep_every});
              }),
              told);
    if (options.keep_last == 0 && options.keep_every == 0) {
      EXPECT_EQ(message_of([&] { load_snapshot(path, state); }), told);
    }
    return told;
  };
  const auto with = [](const std::string& name, const at::Tensor& tensor) {
    auto model = std::make_shared<torch::nn::Module>();
    model->register_buffer(name, tensor);
    return TrainingState{.model = model};
  };
  ShardedRun run;
  for (const char* name : {"a/", "a.pt", "a.safetensors"}) {
    EXPECT_THAT(message(name, {}), HasSubstr("TrainingState.model is not set"));
    EXPECT_THAT(message(name, with("b\xff", torch::ones({1}))),
                HasSubstr("not UTF-8"));
    EXPECT_THAT(message(name, with("b", torch::eye(2).to_sparse())),
                HasSubstr("is not dense"));
    torch::optim::LBFGS lbfgs(run.model->parameters());
    EXPECT_THAT(message(name, {.model = run.model.ptr(), .optimizer = &lbfgs}),
                HasSubstr("LBFGS"));
  }
  EXPECT_THAT(message("a.pt", run.state, {.keep_last = 2}),
              HasSubstr("are for folders of snapshots"));
  EXPECT_THAT(message("a/", run.state, {.keep_every = 2}),
              HasSubstr("set keep_last, too"));
  for (const char* name : {"a/", "a.safetensors"}) {
    EXPECT_THAT(message(name, with("b", torch::ones({1}, at::kComplexDouble))),
                HasSubstr("dtype ComplexDouble"));
  }
  EXPECT_EQ(message("a.safetensors", with("lockstep", torch::ones({1}))), "");
  // Mistakes in the optimizer, the scheduler or the items alone were found by
  // the first save.
  ItemState held;
  StateObject object{&held};
  TrainingState with_object{.model = run.model.ptr(),
                            .items = {{"object", object}}};
  for (const char* name : {"a/", "a.pt", "a.safetensors"}) {
    held = {.values = std::string("\xff")};
    EXPECT_THAT(message(name, with_object), HasSubstr("not UTF-8"));
    held = {.tensors = {{"t", torch::eye(2).to_sparse()}}};
    EXPECT_THAT(message(name, with_object), HasSubstr("is not dense"));
    torch::optim::LBFGS lbfgs(run.model->parameters());
    EXPECT_THAT(
        message(name, {.model = run.model.ptr(), .items = {{"o", lbfgs}}}),
        HasSubstr("LBFGS"));
    torch::optim::Adam stranger({torch::ones({2, 7}).requires_grad_()});
    EXPECT_THAT(
        message(name, {.model = run.model.ptr(), .items = {{"o", stranger}}}),
        HasSubstr("is neither one of TrainingState.model nor"));
    NestedSchedule schedule;
    EXPECT_THAT(message(name, {.model = run.model.ptr(),
                               .optimizer = &run.optimizer,
                               .scheduler = &schedule}),
                HasSubstr("nested"));
  }
  torch::optim::Adam stranger({torch::ones({2, 7}).requires_grad_()});
  EXPECT_THAT(message("a/", {.model = run.model.ptr(), .optimizer = &stranger}),
              HasSubstr("is not one of TrainingState.model"));
  torch::optim::Adam complex(
      {torch::ones({2}, at::kComplexDouble).requires_grad_()});
  EXPECT_THAT(before_training("a.safetensors", {.model = run.model.ptr(),
                                                .optimizer = &complex}),
              HasSubstr("dtype ComplexDouble"));
  for (const char* name : {"a/", "a.safetensors"}) {
    held = {.tensors = {{"t", torch::ones({1}, at::kComplexDouble)}}};
    EXPECT_THAT(message(name, with_object), HasSubstr("dtype ComplexDouble"));
  }
  auto inner = std::make_shared<torch::nn::Module>();
  inner->register_buffer("b", torch::ones({1}));
  auto outer = std::make_shared<torch::nn::Module>();
  outer->register_module("lockstep", inner);
  EXPECT_THAT(message("a.safetensors", {.model = outer}),
              HasSubstr("\"lockstep.b\", which is reserved"));
  EXPECT_EQ(message("a.pt", {.model = outer}), "");  // what it recommends
}

// Also if a program does not count its steps, or changes the model after the
// last one.
TEST(SnapshotSaver, TheEndOfTheTrainingIsSaved) {
  const TemporaryFolder folder;
  ShardedRun run;
  int saves = 0;
  SnapshotSaver saver(folder.file("a/"), run.state,
                      {.on_saved = [&](const auto&) { ++saves; }});
  run.set(3);
  EXPECT_FALSE(saver.is_due());
  saver.save();
  saver.finish();
  EXPECT_EQ(saves, 1);
  EXPECT_FALSE(saver.is_due());
  run.state.metadata["more"] = "text";
  saver.finish();
  EXPECT_EQ(saves, 2);
  ShardedRun loaded;
  ASSERT_TRUE(load_snapshot(folder.file("a/"), loaded.state));
  EXPECT_EQ(loaded.state.metadata["more"], "text");
}

// finish() returned normally with an old snapshot on the disk: after a step
// without is_due(), and after a save() that had thrown.
TEST(SnapshotSaver, TheEndIsSavedWithoutIsDueAndAfterAMistake) {
  const TemporaryFolder folder;
  const std::string path = folder.file("a.pt");
  ShardedRun run;
  SnapshotSaver saver(path, run.state);
  run.set(1);
  saver.save();
  run.set(2);
  saver.finish();
  EXPECT_EQ(number_in(path), 2);
  run.set(3);
  EXPECT_FALSE(saver.is_due());
  run.state.model = nullptr;
  EXPECT_THROW(saver.save(), std::invalid_argument);
  run.state.model = run.model.ptr();
  saver.finish();
  EXPECT_EQ(number_in(path), 3);
}

TEST(SnapshotSaver, ItsOptionsForFoldersArePassedOn) {
  const TemporaryFolder folder;
  ShardedRun run;
  SnapshotSaver saver(folder.file("a/"), run.state,
                      {.keep_last = 1, .keep_every = 2});
  for (int64_t number = 1; number <= 5; ++number) {
    run.set(number);
    saver.save();
  }
  saver.wait();
  EXPECT_THAT(
      names_in(folder.file("a")),
      ElementsAre("000002-step-2", "000004-step-4", "000005-step-5", "latest"));
}

TEST(SnapshotSaver, ItsEndWaitsForTheSaveThatIsUnderWay) {
  const TemporaryFolder folder;
  ShardedRun run;
  std::optional<SavedSnapshot> result;
  std::vector<SnapshotProgress> progress;
  {
    SnapshotSaver saver(
        folder.file("a/"), run.state,
        {.on_saved = [&](const auto& saved) { result = saved; },
         .on_progress = [&](const auto& at) { progress.push_back(at); },
         .overlap_copy = true});
    run.set(4);
    saver.save();
  }
  ASSERT_TRUE(result);
  EXPECT_EQ(result->error, "");
  EXPECT_EQ(number_in(folder.file("a/")), 4);
  ASSERT_FALSE(progress.empty());
  EXPECT_EQ(progress.back().step, 4);
  EXPECT_GT(progress.back().bytes_total, 0u);
  EXPECT_EQ(progress.back().bytes_written, progress.back().bytes_total);
}

}  // namespace
}  // namespace lockstep::internal
