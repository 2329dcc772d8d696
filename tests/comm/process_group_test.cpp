#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/syscall.h>
#include <torch/torch.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/backend_traits.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/register_backend.h"
#include "lockstep/comm/shm/create.h"
#include "tests/harness/call_filter.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using testing::filter_calls;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using testing::World;

WORLD_TEST(ProcessGroup, TellsRankAndSize, 1, 2, 3) {
  EXPECT_FALSE(is_initialized());
  {
    auto group = init_process_group("gloo");
    EXPECT_TRUE(is_initialized());
    EXPECT_EQ(get_rank(), world.rank);
    EXPECT_EQ(get_world_size(), world.size);
    EXPECT_EQ(get_local_rank(), world.rank);
    EXPECT_EQ(local_device(), c10::Device(c10::kCPU));
    EXPECT_EQ(group->name(), "default_pg");
    EXPECT_EQ(group->backend_config(), "cpu:gloo");
  }
  EXPECT_FALSE(is_initialized());
}

WORLD_TEST(ProcessGroup, CanBeMadeAgainAfterDestroy, 2) {
  for (int round = 0; round < 3; ++round) {
    auto group = init_process_group();
    auto tensor = at::ones({1});
    all_reduce(tensor);
    EXPECT_EQ(tensor.item<float>(), 2.0f);
    EXPECT_THAT([] { auto again = init_process_group(); },
                ThrowsMessage<std::invalid_argument>(HasSubstr("twice")));
    destroy_process_group();
    EXPECT_FALSE(is_initialized());
    EXPECT_THROW(get_rank(), std::runtime_error);
    EXPECT_THROW(destroy_process_group(), std::runtime_error);
  }
}

// A rank that needs long to say anything, and looks at the last moment whether
// another rank has already destroyed the group.
class LateStore final : public c10d::FileStore {
 public:
  using FileStore::FileStore;
  using FileStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    std::this_thread::sleep_for(delay);
    destroyed_before = check({"/destroyed"});
    FileStore::set(key, value);
  }

  std::chrono::milliseconds delay{0};
  bool destroyed_before{false};
};

WORLD_TEST(ProcessGroup, IsNotDestroyedBeforeItIsMadeOnEveryRank, 2) {
  auto store = c10::make_intrusive<LateStore>((world.folder / "slow").string(),
                                              world.size);
  auto group = init_process_group(
      "gloo", {.world_size = world.size, .rank = world.rank, .store = store});
  barrier();
  if (world.rank == 1) store->delay = std::chrono::milliseconds(200);
  auto part = new_group();
  if (world.rank == 1) {
    EXPECT_FALSE(store->destroyed_before);
    store->delay = {};
  }
  destroy_process_group(part);
  if (world.rank == 0) store->set("/destroyed", std::vector<uint8_t>{1});
  barrier();
}

WORLD_TEST(ProcessGroup, TheGuardStandsForItsGroup, 1, 2) {
  // A guard that nobody keeps would destroy the group at once.
  static_assert(!std::is_convertible_v<ProcessGroupGuard, ProcessGroupPtr>);
  auto group = init_process_group();
  auto tensor = at::ones({1});
  all_reduce(tensor, {.group = group});
  EXPECT_EQ(tensor.item<float>(), static_cast<float>(world.size));
  EXPECT_EQ(get_rank(group), world.rank);
  const ProcessGroupPtr handle = group;
  EXPECT_EQ(handle, default_group());
  destroy_process_group(group);
  EXPECT_FALSE(is_initialized());
}

WORLD_TEST(ProcessGroup, NewGroupsOfSubsetsWorkSideBySide, 3, 5) {
  auto group = init_process_group();
  std::vector<int> even;
  for (int rank = 0; rank < world.size; rank += 2) even.push_back(rank);
  auto evens = new_group(even);
  auto all = new_group();
  auto last = new_group({world.size - 1});
  EXPECT_EQ(evens != nullptr, world.rank % 2 == 0);
  EXPECT_EQ(last != nullptr, world.rank == world.size - 1);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(all->name(), "2");
  auto count = at::ones({1});
  all_reduce(count, {.group = all});
  EXPECT_EQ(count.item<float>(), world.size);
  if (evens) {
    EXPECT_EQ(get_rank(evens), world.rank / 2);
    EXPECT_EQ(get_world_size(evens), static_cast<int>(even.size()));
    auto members = at::ones({1});
    all_reduce(members, {.group = evens});
    EXPECT_EQ(members.item<float>(), even.size());
    auto value = at::full({1}, float(world.rank));
    broadcast(value, 2, {.group = evens});  // 2 is a rank of the world
    EXPECT_EQ(value.item<float>(), 2.0f);
    EXPECT_THROW(broadcast(value, 1, {.group = evens}), std::invalid_argument);
    destroy_process_group(evens);
    EXPECT_THROW(destroy_process_group(evens), std::invalid_argument);
  }
  EXPECT_THROW(new_group({0, 0}), std::invalid_argument);
  EXPECT_THROW(new_group({0, world.size}), std::invalid_argument);
  barrier();
}

// Runs in a world of its own: the pending operation lives until its processes
// end.
WORLD_TEST(ProcessGroup, AfterAnErrorOneLeavesAtOnceAndCanJoinAgain, 4) {
  auto pending = at::ones({8});
  try {
    auto group = init_process_group("gloo");
    barrier();
    if (world.rank == 0) all_reduce(pending, {.async_op = true});
    throw std::runtime_error("as a training loop would");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(is_initialized());  // the case must end within its deadline
  auto again = init_process_group("gloo");
  auto count = at::ones({1});
  all_reduce(count);
  EXPECT_EQ(count.item<float>(), world.size);
}

// The guard held the lock of the world while the continuations of pending
// operations ran, so that one of them which asked for the world's size waited
// for ever; and the peers were told after that.
WORLD_TEST(ProcessGroup, AContinuationMayAskForTheWorldThatAnExceptionEnds, 3) {
  const auto mark = [&](const char* name) {
    std::ofstream(world.folder / name) << 1;
  };
  const auto await = [&](const char* name) {
    const auto deadline = Deadline::after(std::chrono::seconds(10));
    while (!std::filesystem::exists(world.folder / name)) {
      if (deadline.expired()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
  };
  bool asked = false;
  bool told = false;
  try {
    auto group = init_process_group("shm");
    barrier();
    if (world.rank == 0) {
      auto first = all_reduce(at::ones({2}), {.async_op = true});
      auto second = all_reduce(at::ones({2}), {.async_op = true});
      second->getFuture()->addCallback([&](c10::ivalue::Future&) {
        told = await("told");
        EXPECT_THROW(get_world_size(), std::runtime_error);
        asked = true;
      });
    } else if (world.rank == 1) {
      EXPECT_THROW(all_reduce(at::ones({2})), c10::DistBackendError);
      mark("told");
    } else {
      await("ended");  // rank 2 does not come to the sum
    }
    throw std::runtime_error("as a training loop would");
  } catch (const std::runtime_error&) {
  }
  if (world.rank == 0) {
    EXPECT_TRUE(asked);
    EXPECT_TRUE(told);
    mark("ended");
  }
}

// A rank that had a file or a given store closed its connections while a peer
// was still making them.
WORLD_TEST(ProcessGroup, AGivenStoresRanksAreConnectedWhenOneLeaves, 2, 3) {
  auto store = c10::make_intrusive<LateStore>(
      (world.folder / "connecting").string(), world.size);
  if (world.rank == 1) store->delay = std::chrono::milliseconds(200);
  auto group = init_process_group(
      "gloo", {.world_size = world.size, .rank = world.rank, .store = store});
  if (world.rank == 1) {
    EXPECT_FALSE(store->destroyed_before);
    store->delay = {};
  }
  destroy_process_group();
  if (world.rank == 0) store->set("/destroyed", std::vector<uint8_t>{1});
  store->wait({"/destroyed"}, std::chrono::seconds(20));
}

TEST(Backends, ConfigsResolve) {
  auto names = [](const std::string& config) {
    std::string text;
    for (auto& [type, entry] : resolve_backends(config)) {
      text += c10::DeviceTypeName(type, true) + ":" + entry->name + " ";
    }
    return text;
  };
  EXPECT_EQ(names("gloo"), "cpu:gloo ");
  EXPECT_EQ(names("cpu:gloo"), "cpu:gloo ");
  EXPECT_EQ(names("cpu:gloo,cuda:gloo"), "cpu:gloo cuda:gloo ");
  EXPECT_THAT(names(""), HasSubstr("cpu:lockstep"));
}

TEST(Backends, MistakesSayWhatThereIs) {
  for (auto [config, words] : std::vector<std::pair<std::string, std::string>>{
           {"goo", "\"gloo\""},
           {"GLOO:cpu", "unknown device type \"GLOO\""},
           {"cpu:gloo,cpu:gloo", "twice"},
           {"cpu:gloo,gloo", "device:backend"},
           {"cpu:gloo:x", "device:backend"},
           {"cpu:smoke", "\"smoke\""}}) {
    EXPECT_THAT([&] { resolve_backends(config); },
                ThrowsMessage<std::invalid_argument>(HasSubstr(words)))
        << config;
  }
}

// The backend is that of shared memory, under a name that only this program
// knows.
WORLD_TEST(RegisterBackend, MakesTheBackendOfEveryGroupThatNamesIt, 1, 2) {
  std::vector<std::vector<int64_t>> groups;
  register_backend(
      "mine" + std::to_string(world.size),
      [&](const c10d::DistributedBackendOptions& options) {
        EXPECT_EQ(options.group_size,
                  static_cast<int>(options.global_ranks_in_group.size()));
        EXPECT_EQ(options.timeout, std::chrono::seconds(30));
        groups.push_back(options.global_ranks_in_group);
        return shm::create(
            {.store = options.store,
             .rank = options.group_rank,
             .size = options.group_size,
             .timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
                 options.timeout),
             .group_name = options.group_id,
             .global_ranks = {options.global_ranks_in_group.begin(),
                              options.global_ranks_in_group.end()}});
      },
      {at::kCPU});
  const auto name = "mine" + std::to_string(world.size);
  auto group = init_process_group(name, {.timeout = std::chrono::seconds(30)});
  EXPECT_EQ(default_group()->backend_config(), "cpu:" + name);
  auto tensor = at::full({3}, world.rank + 1.0);
  all_reduce(tensor);
  EXPECT_EQ(tensor[0].item<double>(), world.size * (world.size + 1) / 2);
  auto own = new_group({world.rank}, {.backend = "cpu:" + name});
  EXPECT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups.back(), std::vector<int64_t>{world.rank});
}

// Backends of c10d abort what is pending in their destructors, unless
// shutdown() was called.
WORLD_TEST(RegisterBackend, IsShutDownBeforeItIsDestroyedUnlessAborted, 1) {
  static std::string calls;
  struct Told final : c10d::Backend {
    Told() : Backend(0, 1) {}
    Told(const Told&) = delete;
    Told& operator=(const Told&) = delete;
    ~Told() override { calls += "destroyed "; }
    const std::string getBackendName() const override { return "told"; }
    void shutdown() override { calls += "shutdown "; }
    void abort() override { calls += "abort "; }
  };
  register_backend("told",
                   [](const c10d::DistributedBackendOptions&) {
                     return c10::make_intrusive<Told>();
                   },
                   {at::kCPU});
  {
    const auto group = init_process_group("told");
    destroy_process_group(new_group({0}));
    EXPECT_EQ(std::exchange(calls, ""), "shutdown destroyed ");
  }
  EXPECT_EQ(std::exchange(calls, ""), "shutdown destroyed ");
  {
    const auto group = init_process_group("told");
    default_group()->abort();
  }
  EXPECT_EQ(calls.find("shutdown"), std::string::npos) << calls;
}

// An abort() that threw while an exception left the scope of the guard ended
// the process by std::terminate().
WORLD_TEST(RegisterBackend, ThatCannotAbortDoesNotHideWhatTheProgramThrew, 1) {
  static int aborted = 0;
  struct Stubborn final : c10d::Backend {
    Stubborn() : Backend(0, 1) {}
    const std::string getBackendName() const override { return "stubborn"; }
    void abort() override {
      ++aborted;
      throw std::runtime_error("the system gives no thread");
    }
  };
  register_backend("stubborn",
                   [](const c10d::DistributedBackendOptions&) {
                     return c10::make_intrusive<Stubborn>();
                   },
                   {at::kCPU, at::kMeta});
  EXPECT_THAT(
      [] {
        const auto group = init_process_group("cpu:stubborn,meta:stubborn");
        const auto other = new_group({0});
        throw std::runtime_error("as a training loop would");
      },
      ThrowsMessage<std::runtime_error>("as a training loop would"));
  EXPECT_EQ(aborted, 4);  // each backend of each group
}

// Refuses threads to the thread that calls. Cannot be taken back.
bool refuse_threads() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  return filter_calls(program);
}

// Gloo's abort() threw if the system gave no thread to end pending works.
WORLD_TEST(ProcessGroup, IsAbortedThoughTheSystemGivesNoThread, 2) {
  const auto ended = world.folder / "aborted";
  try {
    const auto group = init_process_group("gloo");
    barrier();
    if (world.rank == 1) {
      const auto deadline = Deadline::after(std::chrono::seconds(30));
      while (!std::filesystem::exists(ended) && !deadline.expired()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    } else {
      // The work is pending until its callback has ended.
      const auto aborted = std::make_shared<std::promise<void>>();
      const auto work = all_reduce(at::ones({2}), {.async_op = true});
      work->getFuture()->addCallback([aborted](c10::ivalue::Future&) {
        aborted->get_future().wait_for(std::chrono::seconds(30));
      });
      bool refuses = false;
      std::thread([&refuses] {
        refuses = refuse_threads();
        if (!refuses) return;
        EXPECT_NO_THROW(default_group()->abort());
      }).join();
      aborted->set_value();
      std::ofstream(ended) << 1;
      if (!refuses) GTEST_SKIP() << "system calls cannot be filtered";
    }
    throw std::runtime_error("as a training loop would");
  } catch (const std::runtime_error&) {
  }
}

// Python's groups leave in destroy_process_group() and live on. If the program
// then ended in an error, abort() locked a mutex of the queue that leave() had
// destroyed.
WORLD_TEST(RegisterBackend, IsNotAbortedAfterItHasLeft, 1) {
  static std::string calls;
  struct Leaving final : c10d::Backend, PeerNotices {
    Leaving() : Backend(0, 1) {}
    const std::string getBackendName() const override { return "leaving"; }
    void abort() override { calls += "abort "; }
    std::string departures() const override { return {}; }
    bool knows_all_peers() const override { return true; }
    void abort_because(const std::string& cause) override {
      calls += "abort: " + cause + " ";
    }
    void keep_cause(const std::string&) override {}
    void leave() override { calls += "leave "; }
  };
  register_backend("leaving",
                   [](const c10d::DistributedBackendOptions&) {
                     return c10::make_intrusive<Leaving>();
                   },
                   {at::kCPU});
  const auto guard = init_process_group("leaving");
  const auto group = new_group({0});
  inside(group).leave();
  group->abort();
  group->abort("rank 3 died");
  EXPECT_EQ(calls, "leave ");
}

}  // namespace
}  // namespace lockstep::internal
