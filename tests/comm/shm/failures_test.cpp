// Tests what "shm" does if ranks disagree, die, stop or are not on one host.
// Faults 1 to 3, 12 and 13 of docs/faults.md.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/shm/create.h"
#include "tests/comm/failure_of.h"
#include "tests/comm/shm/init_shm.h"
#include "tests/comm/store_signs.h"
#include "tests/harness/asleep.h"
#include "tests/harness/process_world.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using testing::await;
using testing::await_asleep;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::init_shm;
using ::testing::Not;
using testing::tell;
using ::testing::ThrowsMessage;
using testing::World;

// Waits until `count` ranks have said `key`, this rank among them. Rank 0 may
// end, and the store with it, as soon as all have.
void join_in(const std::string& key, int count) {
  auto& store = *inside(default_group()).store();
  store.add(key, 1);
  const auto deadline = Deadline::after(seconds(30));
  try {
    while (store.add(key, 0) < count && !deadline.expired()) {
      std::this_thread::sleep_for(milliseconds(5));
    }
  } catch (const c10::DistError&) {
    EXPECT_NE(default_group()->rank(), 0);
  }
}

void await_file(const std::filesystem::path& path) {
  const auto deadline = Deadline::after(seconds(30));
  while (!std::filesystem::exists(path) && !deadline.expired()) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_TRUE(std::filesystem::exists(path)) << path;
}

void make_file(const std::filesystem::path& path) { std::ofstream(path) << 1; }

// A program that has lost a peer ends with an exception, so no rank waits for
// another.
struct PeerLost {};
void run_and_leave_by_exception(const std::function<void()>& body) {
  try {
    auto group = init_shm();
    body();
    throw PeerLost{};
  } catch (const PeerLost&) {
  }
}

// Rank 1 calls `odd`, the others `call`. The error of every rank must have both
// descriptions, without the number after the operation, and the group must
// still work.
void expect_mismatch(const World& world, const std::function<void()>& call,
                     const std::function<void()>& odd, std::string words,
                     std::string odd_words) {
  const auto number =
      " #" +
      std::to_string(inside(default_group()).flight()->last_number() + 1);
  for (auto* text : {&words, &odd_words}) {
    text->insert(std::min(text->find(" ("), text->size()), number);
  }
  const auto text = failure_of(world.rank == 1 ? odd : call);
  EXPECT_THAT(text,
              AllOf(HasSubstr("disagree"),
                    HasSubstr(world.size == 2 ? "rank 0: " + words
                                              : "ranks 0 and 2: " + words),
                    HasSubstr("rank 1: " + odd_words)));
  auto tensor = at::ones({3});
  all_reduce(tensor);
  EXPECT_TRUE(tensor.eq(world.size).all().item<bool>());
}

WORLD_TEST(ShmMismatch, IsToldOnEveryRankAndTheGroupGoesOn, 2, 3) {
  auto group = init_shm();
  auto ones = [](int64_t count, at::ScalarType dtype = at::kFloat) {
    return at::ones({count}, dtype);
  };
  auto gathered = at::zeros({2 * world.size});
  for (int64_t count : {2, 100'000}) {
    const auto elements = std::to_string(count) + " elements";
    expect_mismatch(
        world, [&] { all_reduce(ones(count)); },
        [&] { all_reduce(ones(count, at::kInt)); },
        "all_reduce (SUM, Float, " + elements,
        "all_reduce (SUM, Int, " + elements);
    expect_mismatch(
        world, [&] { all_reduce(ones(count)); },
        [&] { all_reduce(ones(count + 1)); },
        "all_reduce (SUM, Float, " + elements,
        "all_reduce (SUM, Float, " + std::to_string(count + 1) + " elements");
    expect_mismatch(
        world, [&] { all_reduce(ones(count)); },
        [&] { all_reduce(ones(count), {.op = ReduceOp::MAX}); },
        "all_reduce (SUM", "all_reduce (MAX");
    expect_mismatch(
        world, [&] { all_reduce(ones(count), {.async_op = true})->wait(); },
        [&] { broadcast(ones(count), 0); }, "all_reduce (", "broadcast (");
    expect_mismatch(
        world, [&] { broadcast(ones(count), 0); },
        [&] { broadcast(ones(count), 1); }, "broadcast (", "broadcast (");
  }
  expect_mismatch(
      world, [] { barrier(); }, [&] { all_reduce(ones(2)); }, "barrier",
      "all_reduce (");
  expect_mismatch(
      world, [&] { all_gather_into_tensor(gathered, ones(2)); },
      [&] { all_reduce(ones(2)); }, "all_gather_into_tensor (", "all_reduce (");
  // One pair of ranks disagrees: rank 0 sends two, rank 1 expects three.
  std::vector<int64_t> ins(world.size, 1);
  std::vector<int64_t> outs(world.size, 1);
  if (world.rank == 0) ins[1] = 2;
  if (world.rank == 1) outs[0] = 3;
  const AllToAllSingleOptions splits{.output_split_sizes = outs,
                                     .input_split_sizes = ins};
  auto in = at::zeros({world.size + (world.rank == 0 ? 1 : 0)});
  auto out = at::zeros({world.size + (world.rank == 1 ? 2 : 0)});
  EXPECT_THAT(
      failure_of([&] { all_to_all_single(out, in, splits); }),
      AllOf(HasSubstr("disagree"), HasSubstr("rank 0 sends 8 bytes to rank 1"),
            HasSubstr("expects 12")));
  barrier();
}

WORLD_TEST(ShmMismatch, OfAMessageIsToldToWhoReceivesIt, 2) {
  auto group = init_shm();
  if (world.rank == 0) {
    send(at::ones({3}), 1);
    send(at::ones({3}), 1);
    send(at::ones({3}), 1);
  } else {
    auto wrong = at::zeros({4});
    EXPECT_THAT(failure_of([&] { recv(wrong, 0); }), HasSubstr("rank 0"));
    auto integers = at::zeros({3}, at::kInt);
    EXPECT_THAT(failure_of([&] { recv(integers, 0); }), HasSubstr("rank 0"));
    auto right = at::zeros({3});
    recv(right, 0);
    EXPECT_TRUE(right.eq(1).all().item<bool>());
  }
  barrier();
}

WORLD_TEST(ShmFailures, ARankThatDoesNotComeIsNamedOnEveryOther, 2, 3) {
  auto group = init_shm();
  auto tensor = at::ones({3});
  all_reduce(tensor);
  if (world.rank != 1) {
    EXPECT_THAT(
        failure_of([&] { all_reduce(tensor, {.timeout = milliseconds(300)}); }),
        AllOf(HasSubstr("all_reduce"), HasSubstr("rank 1"),
              HasSubstr("has not come"), HasSubstr("all_reduce #1")));
    // The group is broken, and its calls fail at once.
    EXPECT_THAT(failure_of([] { barrier(); }), HasSubstr("rank 1"));
    join_in("failed", world.size);
  } else {
    join_in("failed", world.size);
    // All peers may have called what this rank calls first, but not its second
    // call.
    EXPECT_THAT(failure_of([&] {
                  for (int i = 0; i < 2; ++i) all_reduce(tensor);
                }),
                AllOf(HasSubstr("rank "), HasSubstr("has not come")));
  }
  join_in("seen", world.size);
}

// Regression: the call was skipped, and the next one met the peers' previous
// call: wrong sums.
WORLD_TEST(ShmFailures, ACallThatTimedOutInLineIsNotFollowedByAnother, 2) {
  auto group = init_shm();
  auto first = at::ones({3});
  auto second = at::ones({3});
  if (world.rank == 0) {
    auto work = all_reduce(first, {.async_op = true});
    EXPECT_THAT(
        failure_of([&] { all_reduce(second, {.timeout = milliseconds(200)}); }),
        HasSubstr("all_reduce"));
    failure_of([&] { all_reduce(second); });
    join_in("failed", world.size);
  } else {
    join_in("failed", world.size);
    // The peer may complete the first call; the second has no partner.
    EXPECT_THAT(failure_of([&] {
                  all_reduce(first);
                  all_reduce(second);
                }),
                HasSubstr("rank 0"));
  }
  join_in("seen", world.size);
}

// A bug: the peers were not told, because an error of the system looked like
// one that all ranks get. They waited until their own timeout.
WORLD_TEST(ShmFailures, ACallThatTheSystemEndsOnOneRankFailsOnAll, 2) {
  auto group = init_shm();
  auto tensor = at::ones({3});
  all_reduce(tensor);
  if (world.rank == 0) {
    rlimit usual{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
    // With this limit poll() does not look at the peers' sockets.
    rlimit none = usual;
    none.rlim_cur = 0;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    const auto text = failure_of([&] { all_reduce(tensor); });
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &usual), 0);
    EXPECT_THAT(text, HasSubstr("could not poll the peers' sockets"));
    tell(group.get(), "failed");
  } else {
    await(group.get(), "failed");
    // The peer had announced the first call.
    EXPECT_THAT(failure_of([&] {
                  for (int i = 0; i < 2; ++i) all_reduce(tensor);
                }),
                AllOf(HasSubstr("rank 0"), HasSubstr("could not poll")));
  }
  join_in("seen", world.size);
}

// A bug: such a call got its whole timeout again when its turn had come, and
// lasted up to twice as long.
WORLD_TEST(ShmFailures, ACallThatStoodInLineHasTheRestOfItsTimeout, 2) {
  auto group = init_shm();
  auto first = at::ones({3});
  auto second = at::ones({3});
  if (world.rank == 0) {
    auto work = all_reduce(first, {.async_op = true});
    std::thread teller([&, caller = ::gettid()] {
      // This looks several times at the caller while it stands in line.
      EXPECT_TRUE(await_asleep(caller));
      tell(group.get(), "in line");
    });
    const auto text =
        failure_of([&] { all_reduce(second, {.timeout = milliseconds(500)}); });
    teller.join();
    // The text also says how long the call had waited for its peer. On a busy
    // machine the time may be over before that.
    EXPECT_THAT(text, HasSubstr("(allowed 500 ms)"));
    EXPECT_EQ(text.find("(allowed 500 ms)", text.find("has not come")),
              text.npos)
        << text;
    join_in("failed", world.size);
  } else {
    await(group.get(), "in line");
    // The peer may have given up by now.
    try {
      all_reduce(first);
    } catch (const c10::DistBackendError&) {
    }
    join_in("failed", world.size);
  }
  join_in("seen", world.size);
}

// Regression: the data was written into the tensor of the call that had failed.
WORLD_TEST(ShmFailures, ABlockingReceiveThatTimedOutTakesNoLaterMessage, 2) {
  auto group = init_shm();
  if (world.rank == 0) {
    auto given_up = at::zeros({3});
    EXPECT_THAT(
        failure_of([&] { recv(given_up, 1, {.timeout = milliseconds(200)}); }),
        HasSubstr("rank 1"));
    tell(group.get(), "given up");
    auto tensor = at::zeros({3});
    recv(tensor, 1);
    EXPECT_TRUE(tensor.eq(7).all().item<bool>());
    EXPECT_TRUE(given_up.eq(0).all().item<bool>());
  } else {
    await(group.get(), "given up");
    send(at::full({3}, 7.f), 0);
  }
  barrier();
}

WORLD_TEST(ShmFailures, ARankThatAbortsIsNamedByThoseThatWait, 2, 3) {
  auto group = init_shm();
  auto tensor = at::ones({3});
  all_reduce(tensor);
  if (world.rank == 1) {
    auto pending = at::ones({3});
    auto work = all_reduce(pending, {.async_op = true});
    group->abort();
    EXPECT_THROW(work->wait(), c10::DistBackendError);
    EXPECT_THAT(failure_of([&] { all_reduce(pending); }), HasSubstr("aborted"));
    tell(group.get(), "aborted");
  } else {
    if (world.rank == 0) await(group.get(), "aborted");
    // All ranks may have entered the first call before the abort.
    EXPECT_THAT(failure_of([&] {
                  for (int i = 0; i < 2; ++i) all_reduce(tensor);
                }),
                AllOf(HasSubstr("rank 1"), HasSubstr("aborted")));
  }
  join_in("seen", world.size);
}

// Replaces this rank with a process that is killed or stopped.
class Victim {
 public:
  Victim(const World& world, const std::string& harm)
      : program_({"/usr/bin/timeout", "--foreground", "--kill-after=5", "50",
                  LOCKSTEP_BIN_DIR "/tests/comm_shm_victim", harm},
                 setup(world)) {}

  // Returns the process of the victim itself, not that of `timeout`.
  pid_t pid() const {
    const auto children = testing::read_file(
        "/proc/" + std::to_string(program_.pid()) + "/task/" +
        std::to_string(program_.pid()) + "/children");
    return children.empty() ? 0 : std::stoi(children);
  }
  void signal(int number) const {
    if (const auto victim = pid(); victim > 0) ::kill(victim, number);
  }
  bool await_stopped() const {
    const auto deadline = Deadline::after(seconds(30));
    while (!deadline.expired()) {
      const auto stat =
          testing::read_file("/proc/" + std::to_string(pid()) + "/stat");
      if (stat.find(") T ") != std::string::npos) return true;
      std::this_thread::sleep_for(milliseconds(5));
    }
    return false;
  }
  int finish() { return program_.finish(seconds(50)).exit_code; }

 private:
  static testing::ProgramSetup setup(const World& world) {
    // Removes the files of an earlier case.
    for (const char* name : {"dead", "reducing", "named"}) {
      std::filesystem::remove(world.folder / name);
    }
    testing::ProgramSetup setup{
        .environment = {"TMPDIR=" + world.folder.string()}};
    for (const char* name :
         {"PATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
          "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}) {
      setup.environment.push_back(std::string(name) + "=" + std::getenv(name));
    }
    return setup;
  }
  testing::RunningProgram program_;
};

// The last rank is the victim of `harm`; the others run `call`, which must fail
// and name that rank.
void expect_death_is_named(const World& world, const std::string& harm,
                           const std::function<void()>& call) {
  const int victim = world.size - 1;
  if (world.rank == victim) {
    EXPECT_EQ(Victim(world, harm).finish(), 128 + SIGKILL);
    make_file(world.folder / "dead");
    return;
  }
  run_and_leave_by_exception([&] {
    EXPECT_THAT(failure_of(call),
                AllOf(HasSubstr("rank " + std::to_string(victim) + " died"),
                      HasSubstr("rank " + std::to_string(world.rank))));
    // All later calls of every kind must fail, too.
    const auto named = HasSubstr("rank " + std::to_string(victim));
    EXPECT_THAT(failure_of([] { barrier(); }), named);
    auto tensor = at::zeros({2});
    EXPECT_THAT(failure_of([&] { recv(tensor, victim); }), named);
    join_in("seen", world.size - 1);
  });
}

WORLD_TEST(ShmFailures, ADeathBeforeTheFirstCollectiveIsNamed, 2, 3) {
  expect_death_is_named(world, "die-before",
                        [] { all_reduce(at::ones({1000})); });
}

WORLD_TEST(ShmFailures, ADeathWhileOthersWaitIsNamed, 2, 3) {
  expect_death_is_named(world, "die-between", [&] {
    all_reduce(at::ones({1000}));
    if (world.rank == 0) tell(default_group(), "entering");
    all_reduce(at::ones({1000}));
  });
}

WORLD_TEST(ShmFailures, ADeathOfOneWhoWaitsIsNamed, 2, 3) {
  expect_death_is_named(world, "die-in-wait", [&] {
    all_reduce(at::ones({1000}));
    if (world.rank == 0) {
      tell(default_group(), "waiting");
      await_file(world.folder / "dead");
    }
    // The victim has entered the first of these.
    for (int i = 0; i < 2; ++i) all_reduce(at::ones({1000}));
  });
}

WORLD_TEST(ShmFailures, ADeathAmidLargeReductionsIsNamed, 2, 3) {
  if (world.rank == world.size - 1) {
    Victim process(world, "die-amid");
    await_file(world.folder / "reducing");
    process.signal(SIGKILL);
    EXPECT_EQ(process.finish(), 128 + SIGKILL);
    return;
  }
  expect_death_is_named(world, "", [&] {
    all_reduce(at::ones({1000}));
    auto large = at::ones({4 << 20});
    for (int i = 0;; ++i) {
      all_reduce(large);
      if (i == 3 && world.rank == 0) make_file(world.folder / "reducing");
    }
  });
}

WORLD_TEST(ShmFailures, AStoppedRankThatGoesOnIsWaitedFor, 2, 3) {
  if (world.rank == world.size - 1) {
    Victim process(world, "stop");
    EXPECT_TRUE(process.await_stopped());
    // The pause, in which the others fall asleep in their wait.
    std::this_thread::sleep_for(milliseconds(300));
    process.signal(SIGCONT);
    EXPECT_EQ(process.finish(), 0);
    return;
  }
  auto group = init_shm();
  auto tensor = at::ones({1000});
  all_reduce(tensor);
  if (world.rank == 0) tell(group.get(), "entering");
  all_reduce(tensor);
  EXPECT_TRUE(tensor.eq(world.size * world.size).all().item<bool>());
}

WORLD_TEST(ShmFailures, AStoppedRankIsNamedAtTheDeadline, 2, 3) {
  const int victim = world.size - 1;
  if (world.rank == victim) {
    Victim process(world, "stop");
    EXPECT_TRUE(process.await_stopped());
    await_file(world.folder / "named");
    process.signal(SIGKILL);
    EXPECT_EQ(process.finish(), 128 + SIGKILL);
    return;
  }
  run_and_leave_by_exception([&] {
    all_reduce(at::ones({1000}));
    if (world.rank == 0) tell(default_group(), "entering");
    EXPECT_THAT(failure_of([&] {
                  all_reduce(at::ones({1000}), {.timeout = milliseconds(1500)});
                }),
                AllOf(HasSubstr("rank " + std::to_string(victim)),
                      HasSubstr("has not come"), Not(HasSubstr("died"))));
    join_in("seen", world.size - 1);
    if (world.rank == 0) make_file(world.folder / "named");
  });
}

BackendRequest request_of(int rank, int size, milliseconds timeout) {
  BackendRequest request{.store = c10::make_intrusive<c10d::HashStore>(),
                         .rank = rank,
                         .size = size,
                         .timeout = timeout,
                         .group_name = "0",
                         .global_ranks = {}};
  for (int i = 0; i < size; ++i) request.global_ranks.push_back(10 + i);
  return request;
}

TEST(ShmCreate, RanksOfAnotherHostAreNamedAtOnce) {
  auto request = request_of(0, 3, seconds(30));
  const std::string elsewhere = "another identity\nfar-away";
  for (const char* key : {"shm/host/1", "shm/host/2"}) {
    request.store->set(
        key, std::vector<uint8_t>(elsewhere.begin(), elsewhere.end()));
  }
  EXPECT_THAT([&] { shm::create(request); },
              ThrowsMessage<c10::DistBackendError>(
                  AllOf(HasSubstr("rank 11 (on far-away), rank 12 (on"),
                        HasSubstr("with rank 10"), HasSubstr("gloo"))));
}

TEST(ShmCreate, ARankThatDoesNotComeIsNamed) {
  EXPECT_THAT([] { shm::create(request_of(0, 2, milliseconds(100))); },
              ThrowsMessage<c10::DistBackendError>(
                  HasSubstr("rank 11 did not come in time")));
}

TEST(ShmCreate, MoreThan64RanksAreRefused) {
  EXPECT_THAT([] { shm::create(request_of(0, 65, seconds(1))); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr("64"), HasSubstr("65"), HasSubstr("gloo"))));
}

}  // namespace
}  // namespace lockstep::internal
