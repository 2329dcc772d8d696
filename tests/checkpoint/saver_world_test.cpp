// SnapshotSaver on several ranks.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "lockstep/checkpoint/snapshot_saver.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/comm/world.h"
#include "lockstep/worker/healing_place.h"
#include "tests/checkpoint/sharded/sharded_run.h"
#include "tests/harness/asleep.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::HasSubstr;
using namespace lockstep::internal::testing;
using lockstep::internal::testing::World;
using std::chrono::milliseconds;

std::string saver_path(const World& world, const std::string& name) {
  return (world.folder / name).string();
}

// The last rank is lost before it has written its part, and the others go on
// without it when they have written theirs.
WORLD_TEST(SaverWorld, ASaveOfMoreRanksEndsWhenSomeAreLost, 2, 3) {
  struct Leaves {};
  ::setenv(kHealVariable, "1", 1);
  const std::string path = saver_path(world, "fewer/");
  const bool leaves = world.rank == world.size - 1;
  std::atomic<bool> are_fewer = false;
  std::vector<std::string> errors;
  try {
    const auto group = init_process_group();
    ShardedRun run;
    SnapshotSaver saver(
        path, run.state,
        {.on_saved =
             [&](const SavedSnapshot& saved) { errors.push_back(saved.error); },
         .on_progress =
             [&](const SnapshotProgress&) {
               // As if this thread had died.
               if (leaves) throw std::runtime_error("lost");
               are_fewer.wait(false);
             }});
    run.set(1);
    saver.save();
    if (leaves) throw Leaves();
    std::vector<int> left(static_cast<size_t>(world.size - 1));
    std::iota(left.begin(), left.end(), 0);
    reconfigure({.uuid = "fewer", .members = left});
    are_fewer = true;
    are_fewer.notify_all();
    run_reconfigured();
    EXPECT_FALSE(std::filesystem::exists(path + "latest"));
    run.set(2);
    saver.save();
    saver.wait();
    ASSERT_EQ(errors.size(), 2U);
    EXPECT_NE(errors[0], "");
    EXPECT_EQ(errors[1], "");
    ShardedRun loaded;
    EXPECT_TRUE(load_snapshot(path, loaded.state));
    EXPECT_EQ(loaded.number(), 2);
  } catch (const Leaves&) {
  }
  ::unsetenv(kHealVariable);
}

// A training at step 3 from which the last rank is lost. A new process, with a
// saver of its own, takes its place.
struct Replacement {
  using Part = std::function<void(ShardedRun& run, SnapshotSaver& saver)>;
  std::string name;
  SnapshotSaverOptions options;
  // All ranks do this, and then the last one leaves.
  Part before;
  // The others do this without it.
  Part rest;
  // All do this when the group is complete again.
  std::function<void(ShardedRun& run, SnapshotSaver& saver, bool is_new)> after;
};

void replace_last_rank(const World& world, const Replacement& test) {
  ::setenv(kHealVariable, "1", 1);
  const std::string path = saver_path(world, test.name + "/");
  const auto store = c10::make_intrusive<c10d::FileStore>(
      (world.folder / (test.name + ".store")).string(), -1);
  const auto make_group = [&] {
    return init_process_group(
        "lockstep",
        {.world_size = world.size, .rank = world.rank, .store = store});
  };
  const auto go_on = [&](ShardedRun& run, SnapshotSaver& saver, bool is_new) {
    reconfigure({.uuid = "replaced", .store = store});
    if (is_new) run.set(3);
    run_reconfigured();
    test.after(run, saver, is_new);
    barrier();
    ShardedRun loaded;
    EXPECT_TRUE(load_snapshot(path, loaded.state));
    EXPECT_EQ(loaded.number(), run.number());
    barrier();
  };
  const bool is_lost = world.rank == world.size - 1;
  {
    const auto group = make_group();
    ShardedRun run;
    SnapshotSaver saver(path, run.state, test.options);
    run.set(3);
    test.before(run, saver);
    if (!is_lost) {
      test.rest(run, saver);
      go_on(run, saver, false);
    }
  }
  if (is_lost) {
    ::setenv(kGenerationVariable, "1", 1);
    const auto group = make_group();
    ShardedRun run;
    SnapshotSaver saver(path, run.state, test.options);
    go_on(run, saver, true);
    ::unsetenv(kGenerationVariable);
    // This process may stand for another new one.
    internal::world().has_joined = false;
  }
  ::unsetenv(kHealVariable);
}

void expect_interrupted(ShardedRun&, SnapshotSaver& saver) {
  EXPECT_THROW(saver.save(), c10::DistError);
}

// `run([&] { if (saver.is_due()) saver.save(); })` is called again by all. The
// snapshot was left out.
WORLD_TEST(SaverWorld, ADueSaveInWhichARankIsLostIsDueAgain, 2, 3) {
  const auto is_due = [](ShardedRun&, SnapshotSaver& saver) {
    EXPECT_TRUE(saver.is_due());
  };
  const auto save_again = [&](ShardedRun& run, SnapshotSaver& saver, bool) {
    is_due(run, saver);
    saver.save();
    saver.wait();
    EXPECT_FALSE(saver.is_due());
  };
  replace_last_rank(world, {.name = "steps",
                            .options = {.every_steps = 3},
                            .before = is_due,
                            .rest = expect_interrupted,
                            .after = save_again});
  // No other case has this signal, which this process does not forget.
  replace_last_rank(
      world, {.name = "signal",
              .options = {.stop_signals = {SIGVTALRM}},
              .before =
                  [&](ShardedRun& run, SnapshotSaver& saver) {
                    if (world.rank == world.size - 1) ::raise(SIGVTALRM);
                    is_due(run, saver);
                  },
              .rest = expect_interrupted,
              .after =
                  [&](ShardedRun& run, SnapshotSaver& saver, bool is_new) {
                    EXPECT_TRUE(saver.stop_requested());
                    save_again(run, saver, is_new);
                  }});
}

// All but the last rank are in the all_reduce of is_due() when that is lost.
WORLD_TEST(SaverWorld, IsDueInWhichARankIsLostIsAskedAgain, 2, 3) {
  replace_last_rank(world, {.name = "asked",
                            .options = {.every_steps = 3},
                            .before = [](ShardedRun&, SnapshotSaver&) {},
                            .rest =
                                [](ShardedRun&, SnapshotSaver& saver) {
                                  EXPECT_THROW(saver.is_due(), c10::DistError);
                                },
                            .after =
                                [](ShardedRun&, SnapshotSaver& saver, bool) {
                                  EXPECT_TRUE(saver.is_due());
                                  saver.save();
                                  saver.wait();
                                }});
}

// `if (saver.is_due()) run([&] { saver.save(); });` is not collective: the new
// process alone asks at the step at which the others have asked, and must find
// the same, whether they save again or have saved.
WORLD_TEST(SaverWorld, AProcessThatTakesAPlaceFindsTheSameDue, 2, 3) {
  for (const bool is_saved : {false, true}) {
    replace_last_rank(
        world, {.name = is_saved ? "saved" : "interrupted",
                .options = {.every_steps = 3,
                            .stop_signals = {},
                            .in_background = false},
                .before =
                    [&](ShardedRun&, SnapshotSaver& saver) {
                      EXPECT_TRUE(saver.is_due());
                      if (!is_saved) return;
                      saver.save();
                      barrier();
                    },
                .rest =
                    [&](ShardedRun& run, SnapshotSaver& saver) {
                      if (!is_saved) expect_interrupted(run, saver);
                    },
                .after =
                    [&](ShardedRun& run, SnapshotSaver& saver, bool is_new) {
                      if (is_new) {
                        EXPECT_TRUE(saver.is_due());
                      }
                      if (!is_saved) saver.save();
                      ++run.state.step;
                      EXPECT_FALSE(saver.is_due());
                      --run.state.step;
                    }});
  }
}

// A save in the background is lost with the rank when the training is at the
// next step already. The snapshot was left out.
WORLD_TEST(SaverWorld, ALostSaveInTheBackgroundIsMadeUpFor, 2, 3) {
  const bool is_lost = world.rank == world.size - 1;
  std::atomic<bool> is_over = false;
  std::atomic<bool> is_replaced = false;
  const auto on_progress = [&](const SnapshotProgress&) {
    if (is_replaced) return;
    // As if this thread had died.
    if (is_lost) throw std::runtime_error("lost");
    is_over.wait(false);
  };
  replace_last_rank(world,
                    {.name = "background",
                     .options = {.every_steps = 3,
                                 .on_saved = [](const SavedSnapshot&) {},
                                 .on_progress = on_progress},
                     .before =
                         [&](ShardedRun& run, SnapshotSaver& saver) {
                           EXPECT_TRUE(saver.is_due());
                           saver.save();
                           run.set(4);
                           EXPECT_FALSE(saver.is_due());
                           barrier();
                         },
                     .rest =
                         [&](ShardedRun&, SnapshotSaver&) {
                           // The others wait in the exchange that the rank will
                           // not come to.
                           is_over = true;
                           is_over.notify_all();
                         },
                     .after =
                         [&](ShardedRun& run, SnapshotSaver& saver, bool) {
                           is_replaced = true;
                           run.set(5);
                           EXPECT_TRUE(saver.is_due());
                           saver.save();
                           saver.wait();
                           run.set(4);
                           EXPECT_FALSE(saver.is_due());
                           run.set(5);
                         }});
}

// The collectives of the training and those of the save do not meet.
WORLD_TEST(SaverWorld, TrainingGoesOnWhileTheRanksSave, 1, 2, 3) {
  const auto group = init_process_group();
  for (const std::string name : {"going/", "going.pt"}) {
    const std::string path = saver_path(world, name);
    ShardedRun run;
    int64_t saves = 0;
    {
      SnapshotSaver saver(path, run.state,
                          {.every_steps = 3,
                           .on_saved =
                               [&](const SavedSnapshot& saved) {
                                 EXPECT_EQ(saved.error, "");
                                 EXPECT_EQ(saved.step, 3 * ++saves);
                               },
                           .overlap_copy = name.ends_with('/')});
      for (int64_t step = 1; step <= 20; ++step) {
        at::Tensor sum = torch::ones({1000});
        all_reduce(sum);
        EXPECT_EQ(sum.min().item<float>(), world.size);
        saver.wait_for_copy();
        run.set(step);
        if (saver.is_due()) saver.save();
      }
      saver.wait();
      EXPECT_EQ(saves, 6);
      barrier();
      ShardedRun loaded;
      EXPECT_TRUE(load_snapshot(path, loaded.state));
      EXPECT_EQ(loaded.number(), 18);
      run.set(21);
      saves = 6;
      saver.save();
    }
    EXPECT_EQ(saves, 7);
    ShardedRun loaded;
    EXPECT_TRUE(load_snapshot(path, loaded.state));
    EXPECT_EQ(loaded.number(), 21);
    barrier();
  }
}

WORLD_TEST(SaverWorld, ASignalToOneRankStopsAllAtTheSameStep, 2, 3) {
  const auto group = init_process_group();
  const std::string path = saver_path(world, "stop/");
  ShardedRun run;
  // No other case has this signal, which this process does not forget.
  SnapshotSaver saver(path, run.state, {.stop_signals = {SIGALRM}});
  for (int64_t step = 1; step <= 100; ++step) {
    run.set(step);
    if (step == 4 && world.rank == 1) ::raise(SIGALRM);
    if (saver.is_due()) saver.save();
    if (saver.stop_requested()) break;
  }
  saver.finish();
  EXPECT_EQ(run.state.step, 4);
  ShardedRun loaded;
  EXPECT_TRUE(load_snapshot(path, loaded.state));
  EXPECT_EQ(loaded.number(), 4);
}

// The others' clocks do not matter.
WORLD_TEST(SaverWorld, TheFirstRanksClockDecides, 2) {
  const auto group = init_process_group();
  ShardedRun run;
  SnapshotSaver saver(saver_path(world, "clock/"), run.state,
                      {.every = world.rank == 0 ? milliseconds(20)
                                                : milliseconds(1'000'000'000)});
  SnapshotSaver never(saver_path(world, "never/"), run.state,
                      {.every = world.rank == 0 ? milliseconds(1'000'000'000)
                                                : milliseconds(1)});
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_TRUE(saver.is_due());
  EXPECT_FALSE(never.is_due());
}

// Rank 1 cannot write (a limit on the size of its files stands for a full
// disk): no rank has a new snapshot, all know why, and the next save succeeds.
WORLD_TEST(SaverWorld, ARankThatCannotWriteIsNamedToAll, 2, 3) {
  const auto group = init_process_group();
  const std::string path = saver_path(world, "full/");
  ShardedRun run;
  std::vector<SavedSnapshot> results;
  SnapshotSaver saver(path, run.state, {.on_saved = [&](const auto& saved) {
                        results.push_back(saved);
                      }});
  run.set(1);
  saver.save();
  saver.wait();
  ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit limit {};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  const auto before = limit.rlim_cur;
  if (world.rank == 1) {
    limit.rlim_cur = 100;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  run.set(2);
  saver.save();
  saver.wait();
  if (world.rank == 1) {
    limit.rlim_cur = before;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ASSERT_EQ(results.size(), 2u);
  EXPECT_THAT(results[1].error, HasSubstr("File too large"));
  if (world.rank != 1) {
    EXPECT_THAT(results[1].error, HasSubstr("was not saved: rank 1: "));
  }
  saver.finish();
  ASSERT_EQ(results.size(), 3u);
  EXPECT_EQ(results[2].error, "");
  barrier();
  EXPECT_EQ(names_in(path), (std::vector<std::string>{
                                "000001-step-1", "000002-step-2", "latest"}));
}

// A mistake that only one rank can see is thrown by all as such, so that none
// goes on to a collective of its own.
WORLD_TEST(SaverWorld, AMistakeOfOneRankIsThrownByAll, 2, 3) {
  const auto group = init_process_group();
  ShardedRun run;
  for (const char* name : {"mistake/", "mistake.pt"}) {
    const std::string path = saver_path(world, name);
    TrainingState state = run.state;
    SnapshotSaver saver(path, state);
    if (world.rank == 0) state.metadata["no UTF-8"] = "\xff";
    EXPECT_THROW(saver.save(), std::invalid_argument) << name;
    EXPECT_THROW(save_snapshot(path, state), std::invalid_argument) << name;
    // If it is known at construction, that is where it is said.
    const std::string message =
        message_of([&] { SnapshotSaver early(path, state); });
    EXPECT_THAT(message, HasSubstr("not UTF-8"));
    if (world.rank != 0) {
      EXPECT_THAT(message, HasSubstr("cannot be saved: rank 0: "));
    }
  }
}

// Rank 0 threw alone when it told the others the name of the folder, and they
// waited for the group's timeout.
WORLD_TEST(SaverWorld, AFolderWhoseNameIsNotUtf8IsSavedInBackground, 2) {
  const auto group = init_process_group();
  ShardedRun run;
  for (const char* name : {"folder\xff/", "file\xff.pt"}) {
    const std::string path = saver_path(world, name);
    SnapshotSaver saver(path, run.state, {.in_background = true});
    saver.save();
    saver.finish();
    barrier();
    ShardedRun loaded;
    EXPECT_TRUE(load_snapshot(path, loaded.state)) << name;
  }
}

// A copy that was disturbed on one rank is a failed save on all.
WORLD_TEST(SaverWorld, ADisturbedCopyOnOneRankFailsOnAll, 2) {
  const auto group = init_process_group();
  const std::string path = saver_path(world, "torn/");
  ShardedRun run;
  const Ranks ranks(nullptr);
  SaveFiles files;
  const auto save = begin_save(path, run.state, {}, ranks, files);
  if (world.rank == 1) {
    save->fail(std::make_exception_ptr(std::runtime_error("was changed")));
  }
  save->write();
  EXPECT_THAT(message_of([&] { save->commit(ranks.through_store()); }),
              HasSubstr("was changed"));
}

// A second passes in the first collective, so that progress is reported before
// anything is written, too.
WORLD_TEST(SaverWorld, ALongSaveTellsHowFarItIs, 2) {
  const auto group = init_process_group();
  ShardedRun run;
  std::vector<SnapshotProgress> progress;
  SnapshotSaver saver(saver_path(world, "long/"), run.state,
                      {.on_progress = [&](const SnapshotProgress& at) {
                        progress.push_back(at);
                      }});
  run.set(9);
  if (world.rank == 0) {
    inside(group).store()->set("saves", std::to_string(::getpid()));
  } else {
    const auto waiting = inside(group).store()->get_to_str("saves");
    EXPECT_TRUE(await_asleep(std::stoi(waiting)));
    std::this_thread::sleep_for(milliseconds(1100));
  }
  saver.save();
  saver.finish();
  // Rank 0 has waited for rank 1 before its first call to the system.
  ASSERT_GE(progress.size(), world.rank == 0 ? 2u : 1u);
  if (world.rank == 0) {
    EXPECT_EQ(progress.front().bytes_written, 0u);
  }
  EXPECT_EQ(progress.back().bytes_written, progress.back().bytes_total);
  EXPECT_GT(progress.back().bytes_total, 0u);
}

// Waits until another rank has made the file.
void await_file(const std::filesystem::path& path) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!std::filesystem::exists(path)) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << path;
    std::this_thread::sleep_for(milliseconds(5));
  }
}

// Rank 1 wrote longer than the group's timeout: rank 0 gave the save up, and
// rank 1 was one exchange ahead from then on. A later save took rank 1's files
// of the save before for those of its own, and the good snapshot was removed.
WORLD_TEST(SaverWorld, ASaveThatTimedOutDoesNotDisturbLaterOnes, 2) {
  const auto group = init_process_group({}, {.timeout = milliseconds(2000)});
  const std::string path = saver_path(world, "late/");
  const auto given_up = world.folder / "given up";
  const auto ended = world.folder / "ended";
  ShardedRun run;
  bool is_late = false;
  std::vector<SavedSnapshot> results;
  SnapshotSaver saver(
      path, run.state,
      {.keep_last = 1,
       .on_saved = [&](const auto& saved) { results.push_back(saved); },
       .on_progress =
           [&](const SnapshotProgress&) {
             if (is_late) await_file(given_up);
           }});
  const auto save = [&](int64_t number) {
    run.set(number);
    saver.save();
    saver.wait();
  };
  save(1);
  is_late = world.rank == 1;
  save(2);
  is_late = false;
  if (world.rank == 0) {
    std::ofstream{given_up};
    await_file(ended);
  } else {
    std::ofstream{ended};
  }
  ASSERT_EQ(results.size(), 2u);
  EXPECT_THAT(results[1].error, HasSubstr("did not come in time"));
  for (int64_t number = 3; number <= 5; ++number) {
    save(number);
    EXPECT_EQ(results.back().error, "");
  }
  barrier();
  EXPECT_EQ(names_in(path),
            (std::vector<std::string>{"000004-step-5", "latest"}));
  EXPECT_EQ(message_of([&] { verify_snapshot(path); }), "");
  barrier();
}

// The rank that writes a file threw when it counted the bytes of a sparse
// buffer, and the others waited for it until the timeout. Now it is said before
// the training.
WORLD_TEST(SaverWorld, ATensorThatCannotBeSavedFailsOnAllRanks, 2) {
  const auto group = init_process_group({}, {.timeout = milliseconds(5000)});
  const auto model = std::make_shared<torch::nn::Module>();
  model->register_parameter("dense", torch::ones({2}));
  model->register_buffer("sparse", torch::eye(3).to_sparse());
  const TrainingState state{.model = model};
  for (const char* name : {"sparse.pt", "sparse.safetensors", "sparse/"}) {
    const std::string path = saver_path(world, name);
    EXPECT_THAT(message_of([&] { SnapshotSaver(path, state); }),
                HasSubstr("sparse\" is not dense"));
    EXPECT_THAT(message_of([&] { save_snapshot(path, state); }),
                HasSubstr("sparse\" is not dense"));
  }
}

}  // namespace
}  // namespace lockstep::internal
