#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/store_socket.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using testing::World;

// Sets environment variables for one test and restores them; an empty value
// unsets.
class ScopedEnvironment {
 public:
  using Variables = std::vector<std::pair<std::string, std::string>>;

  explicit ScopedEnvironment(const Variables& variables) {
    for (const auto& [name, value] : variables) {
      const char* before = std::getenv(name.c_str());
      before_.emplace_back(name, before != nullptr ? before : "");
      set(name, value);
    }
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;
  ~ScopedEnvironment() {
    for (const auto& [name, value] : before_) set(name, value);
  }

 private:
  static void set(const std::string& name, const std::string& value) {
    if (value.empty()) {
      ::unsetenv(name.c_str());
    } else {
      ::setenv(name.c_str(), value.c_str(), 1);
    }
  }
  std::vector<std::pair<std::string, std::string>> before_;
};

void expect_sum_of_ones(int size) {
  auto tensor = at::ones({1});
  all_reduce(tensor);
  EXPECT_EQ(tensor.item<float>(), size);
}

// LibTorch's look-ups of a peer's name take 5 s each if no name server answers.
auto init_by(const std::string& method, int rank = -1, int world_size = -1) {
  return [=] {
    auto group = init_process_group("gloo", {.init_method = method,
                                             .timeout = std::chrono::minutes(1),
                                             .world_size = world_size,
                                             .rank = rank});
  };
}

WORLD_TEST(Rendezvous, ByTcpUrl, 1, 2, 3) {
  std::string url =
      std::string("tcp://127.0.0.1:") + std::getenv("MASTER_PORT");
  {
    auto group = init_process_group(
        "gloo",
        {.init_method = url, .world_size = world.size, .rank = world.rank});
    expect_sum_of_ones(world.size);
  }
  auto group = init_process_group(
      "gloo", {.init_method = url + "?rank=" + std::to_string(world.rank) +
                              "&world_size=" + std::to_string(world.size)});
  expect_sum_of_ones(world.size);
}

WORLD_TEST(Rendezvous, ByFile, 1, 2, 3) {
  auto group = init_process_group(
      "gloo", {.init_method = "file://" + (world.folder / "meet").string(),
               .world_size = world.size,
               .rank = world.rank});
  expect_sum_of_ones(world.size);
}

// A store's file may stay if the ranks destroy the store at the same moment, so
// each case has a file of its own: rank 1 read in that of the case before that
// rank 0 had left.
WORLD_TEST(Rendezvous, ByAGivenStore, 1, 2, 3) {
  auto store = c10::make_intrusive<c10d::FileStore>(
      (world.folder / "given").string(), world.size);
  auto group = init_process_group(
      "gloo", {.world_size = world.size, .rank = world.rank, .store = store});
  expect_sum_of_ones(world.size);
}

// The store of a launcher, with the keys that Python's ranks would see there.
class LauncherStore {
 public:
  // Rank 0 of the test hosts the store, at a port of its own.
  LauncherStore(const World& world, const std::string& name) {
    c10d::TCPStoreOptions options;
    options.port = 0;
    options.isServer = world.rank == 0;
    options.waitWorkers = false;
    auto file = c10::make_intrusive<c10d::FileStore>(
        (world.folder / name).string(), world.size);
    if (world.rank == 0) {
      store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
      auto port = std::to_string(store_->getPort());
      file->set("port", {port.begin(), port.end()});
    } else {
      auto port = file->get("port");
      options.port = static_cast<uint16_t>(
          std::stoi(std::string(port.begin(), port.end())));
      store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    }
  }
  std::string port() const { return std::to_string(store_->getPort()); }

  // Returns whether the default group's keys have the names that Python gives
  // them.
  bool is_used_as_python_does() const {
    auto mark = "mark" + std::to_string(marks_++);
    inside(default_group()).store()->set(mark, std::vector<uint8_t>{1});
    auto python = c10::make_intrusive<c10d::PrefixStore>(
        "lockstep/", c10::make_intrusive<c10d::PrefixStore>(
                         "0/", c10::make_intrusive<c10d::PrefixStore>(
                                   "default_pg", store_)));
    return python->check({mark});
  }

 private:
  c10::intrusive_ptr<c10d::TCPStore> store_;
  mutable int marks_ = 0;
};

WORLD_TEST(Rendezvous, ALaunchersStoreServesRestartsAndRounds, 2, 3) {
  LauncherStore first(world, "first");
  auto join = [&](const LauncherStore& store, const char* restart) {
    ScopedEnvironment launcher({{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                {"TORCHELASTIC_RESTART_COUNT", restart},
                                {"MASTER_PORT", store.port()}});
    auto group =
        init_process_group("gloo", {.timeout = std::chrono::seconds(20)});
    expect_sum_of_ones(world.size);
    barrier();
    return store.is_used_as_python_does();
  };
  EXPECT_TRUE(join(first, "0"));
  EXPECT_FALSE(join(first, "0"));  // the same process joins again
  EXPECT_FALSE(join(first, "1"));  // the launcher kept the store
  LauncherStore second(world, "second");
  EXPECT_TRUE(join(second, "2"));  // the launcher made a new one
  // No rank may leave while another still uses the store that rank 0 hosts.
  auto end = c10::make_intrusive<c10d::FileStore>(
      (world.folder / "end").string(), world.size);
  end->set("rank" + std::to_string(world.rank), std::vector<uint8_t>{1});
  for (int rank = 0; rank < world.size; ++rank) {
    end->wait({"rank" + std::to_string(rank)}, std::chrono::seconds(20));
  }
}

// The launcher hosts the store only at its own address.
WORLD_TEST(Rendezvous, UnderALauncherAnotherAddressIsHostedByRankZero, 2) {
  std::string url =
      std::string("tcp://127.0.0.1:") + std::getenv("MASTER_PORT");
  ScopedEnvironment launcher(
      {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"MASTER_PORT", "1"}});
  auto group = init_process_group("gloo", {.init_method = url,
                                           .timeout = std::chrono::seconds(20),
                                           .world_size = world.size,
                                           .rank = world.rank});
  expect_sum_of_ones(world.size);
}

WORLD_TEST(Rendezvous, AbsentRanksAreNamedAtTheTimeout, 3) {
  if (world.rank == 2) return;
  // The timeouts cover LibTorch's look-up of the peer's name, which takes 5 s
  // if no name server answers; and rank 1 fails first.
  std::chrono::seconds timeout(world.rank == 0 ? 9 : 7);
  EXPECT_THAT(
      [&] { auto group = init_process_group("gloo", {.timeout = timeout}); },
      ThrowsMessage<c10::DistError>(
          AllOf(HasSubstr("world of 3"), HasSubstr("absent: rank 2"))));
}

// The timeout is long, yet much shorter than LibTorch's client may take.
TEST(RendezvousTimeouts, AnAbsentStoreIsWaitedForToTheTimeoutAndNoLonger) {
  for (const char* address : {"127.0.0.1", "192.0.2.1", "[::1]"}) {
    ::testing::internal::CaptureStderr();
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THAT(
        [&] {
          auto group = init_process_group(
              "gloo", {.init_method = std::string("tcp://") + address + ":1",
                       .timeout = std::chrono::seconds(1),
                       .world_size = 2,
                       .rank = 1});
        },
        ThrowsMessage<c10::DistError>(
            AllOf(HasSubstr("could not reach the store at"),
                  HasSubstr("rank 0 hosts it"), HasSubstr("allowed 1000 ms"))));
    EXPECT_LT(std::chrono::steady_clock::now() - start,
              std::chrono::seconds(5));
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << address;
  }
}

WORLD_TEST(Rendezvous, TheLongestTimeoutIsNone, 2) {
  for (const char* backend : {"gloo", "lockstep"}) {
    constexpr auto kForEver = std::chrono::milliseconds::max();
    auto group = init_process_group(backend, {.timeout = kForEver});
    expect_sum_of_ones(world.size);
    auto tensor = at::ones({1});
    all_reduce(tensor, {.async_op = true, .timeout = kForEver})->wait(kForEver);
    EXPECT_EQ(tensor.item<float>(), world.size);
    monitored_barrier({.timeout = kForEver});
    auto part = new_group({}, {.timeout = kForEver});
    all_reduce(tensor, {.group = part});
    auto arrived = at::zeros({1});
    if (world.rank == 0) {
      send(tensor, 1, {.timeout = kForEver});
    } else {
      recv(arrived, 0, {.timeout = kForEver});
      EXPECT_EQ(arrived.item<float>(), 2 * world.size);
    }
    barrier();
  }
}

WORLD_TEST(Rendezvous, TimeoutsThatAreNotPositiveAreRefused, 1) {
  for (const int given : {-5, 0}) {
    const std::chrono::milliseconds timeout{given};
    const auto refuses = ThrowsMessage<std::invalid_argument>(
        AllOf(HasSubstr("timeout is " + std::to_string(given) + " ms"),
              HasSubstr("more than 0")));
    EXPECT_THAT(
        [&] { auto none = init_process_group("gloo", {.timeout = timeout}); },
        refuses);
    auto group = init_process_group("gloo");
    EXPECT_THAT([&] { all_reduce(at::ones({1}), {.timeout = timeout}); },
                refuses);
    EXPECT_THAT([&] { new_group({}, {.timeout = timeout}); }, refuses);
    EXPECT_THAT([&] { split_group({{0}}, {.timeout = timeout}); }, refuses);
  }
}

// The file is as a killed run leaves it. Rank 1 did not join that run, so rank
// 0 must tell it.
WORLD_TEST(Rendezvous, AFileOfAnEarlierRunIsNamed, 2) {
  const auto path = (world.folder / "stale").string();
  if (world.rank == 0) {
    // The killed run did not destroy its store.
    std::make_unique<c10d::FileStore>(path, 3).release()->add("lockstep/rank 0",
                                                              1);
    ASSERT_TRUE(std::filesystem::exists(path));
    std::ofstream(path + ".ready").close();
  }
  while (!std::filesystem::exists(path + ".ready")) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::string text;
  try {
    auto group = init_process_group("gloo", {.init_method = "file://" + path,
                                             .timeout = std::chrono::minutes(5),
                                             .world_size = 2,
                                             .rank = world.rank});
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  EXPECT_THAT(text, AllOf(HasSubstr(path), HasSubstr("from an earlier run")));
}

// Returns the words with which joining fails on this rank.
std::string failure_to_join(const InitProcessGroupOptions& options) {
  try {
    auto group = init_process_group("gloo", options);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "this rank has joined";
}

// Only the rank with the mistake knew of it, and the others waited for it until
// their deadline.
WORLD_TEST(Rendezvous, AWrongVariableOnOneRankIsToldToAll, 2, 3) {
  const auto file = "file://" + (world.folder / "wrong").string();
  for (const auto& [name, value] :
       {std::pair{"LOCKSTEP_FLIGHT_SIGNAL", "maybe"},
        {"TORCH_DISTRIBUTED_DEBUG", "verbose"}}) {
    const ScopedEnvironment wrong(
        ScopedEnvironment::Variables{{name, world.rank == 1 ? value : ""}});
    for (const auto& method : {std::string("env://"), file + name}) {
      const bool by_file = method != "env://";
      EXPECT_THAT(
          failure_to_join({.init_method = method,
                           .timeout = std::chrono::seconds(10),
                           .world_size = by_file ? world.size : -1,
                           .rank = by_file ? world.rank : -1}),
          AllOf(HasSubstr(name), HasSubstr(value), HasSubstr("allowed")));
    }
  }
}

// The spelling "detail" meant nothing, and ranks that differed blamed a rank
// that had done nothing wrong for not coming.
WORLD_TEST(Rendezvous, RanksAgreeWhetherTheyCompareTheirCalls, 2, 3) {
  {
    const ScopedEnvironment all(
        ScopedEnvironment::Variables{{"TORCH_DISTRIBUTED_DEBUG", "detail"}});
    auto group = init_process_group("gloo");
    EXPECT_TRUE(group->checks_calls());
  }
  {
    const ScopedEnvironment all(
        ScopedEnvironment::Variables{{"TORCH_DISTRIBUTED_DEBUG", "Info"}});
    auto group = init_process_group("gloo");
    EXPECT_FALSE(group->checks_calls());
  }
  const ScopedEnvironment one(ScopedEnvironment::Variables{
      {"TORCH_DISTRIBUTED_DEBUG", world.rank == 1 ? "DETAIL" : ""}});
  EXPECT_THAT(failure_to_join({.timeout = std::chrono::seconds(10)}),
              AllOf(HasSubstr("rank 1"), HasSubstr("compares"),
                    HasSubstr("TORCH_DISTRIBUTED_DEBUG")));
}

WORLD_TEST(Rendezvous, TwoEqualRanksAreRefused, 2) {
  auto port = std::string(std::getenv("MASTER_PORT"));
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(port));
  options.isServer = world.rank == 0;
  options.waitWorkers = false;
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  if (world.rank == 1) {
    store->set("lockstep/0/host", std::vector<uint8_t>{1});
    store->add("lockstep/0/rank/1", 1);  // as the other rank 1 does
    EXPECT_THAT(init_by("tcp://127.0.0.1:" + port, 1, 3),
                ThrowsMessage<std::invalid_argument>(
                    HasSubstr("call themselves rank 1")));
    store->set("done", std::vector<uint8_t>{1});
    return;
  }
  store->wait({"done"}, std::chrono::seconds(30));
}

WORLD_TEST(Rendezvous, UnequalWorldSizesAreRefused, 2) {
  std::string url =
      std::string("tcp://127.0.0.1:") + std::getenv("MASTER_PORT");
  // Rank 0 gives 2, rank 1 gives 3: the rank that comes second reports the
  // difference, and the other one stops waiting at its timeout.
  try {
    init_by(url, world.rank, world.rank == 0 ? 2 : 3)();
    FAIL() << "worlds of 2 and 3 ranks joined";
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("world size 2"), HasSubstr("world size 3")));
  } catch (const c10::DistError& error) {
    EXPECT_THAT(error.what(), HasSubstr("absent"));
  }
}

WORLD_TEST(Rendezvous, APortInUseIsNamed, 1) {
  auto port = std::string(std::getenv("MASTER_PORT"));
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(port));
  options.isServer = true;
  options.waitWorkers = false;
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  EXPECT_THAT(init_by("tcp://127.0.0.1:" + port, 0, 2),
              ThrowsMessage<std::system_error>(
                  AllOf(HasSubstr("127.0.0.1:" + port),
                        HasSubstr("Address already in use"))));
}

TEST(RendezvousEnvironment, WithoutVariablesIsAWorldOfOne) {
  ScopedEnvironment clean({{"RANK", ""},
                           {"WORLD_SIZE", ""},
                           {"MASTER_ADDR", ""},
                           {"MASTER_PORT", ""}});
  auto group = init_process_group();
  EXPECT_EQ(get_world_size(), 1);
  expect_sum_of_ones(1);
}

TEST(RendezvousEnvironment, SomeButNotAllNamesTheMissing) {
  ScopedEnvironment some({{"RANK", "0"},
                          {"WORLD_SIZE", "2"},
                          {"MASTER_ADDR", ""},
                          {"MASTER_PORT", ""}});
  EXPECT_THAT(init_by(""), ThrowsMessage<std::invalid_argument>(
                               AllOf(HasSubstr("not set: MASTER_ADDR, "
                                               "MASTER_PORT"),
                                     HasSubstr("lockstep run"))));
}

TEST(RendezvousEnvironment, AnotherLauncherWithoutAnAddressIsNotAlone) {
  ScopedEnvironment slurm({{"RANK", ""},
                           {"WORLD_SIZE", ""},
                           {"MASTER_ADDR", ""},
                           {"MASTER_PORT", ""},
                           {"SLURM_NTASKS", "4"}});
  EXPECT_THAT(init_by("env://"), ThrowsMessage<std::invalid_argument>(
                                     HasSubstr("SLURM_NTASKS is 4")));
}

TEST(RendezvousEnvironment, WrongNumbersNameTheVariable) {
  ScopedEnvironment base({{"RANK", "2"},
                          {"WORLD_SIZE", "2"},
                          {"MASTER_ADDR", "127.0.0.1"},
                          {"MASTER_PORT", "29500"}});
  EXPECT_THAT(init_by(""), ThrowsMessage<std::invalid_argument>(
                               HasSubstr("rank 2 in a world of 2")));
  ScopedEnvironment port({{"RANK", "0"}, {"MASTER_PORT", "295000"}});
  EXPECT_THAT(init_by(""), ThrowsMessage<std::invalid_argument>(
                               HasSubstr("MASTER_PORT is \"295000\"")));
}

TEST(RendezvousMistakes, EachSaysWhatToDo) {
  for (auto [method, words] : std::vector<std::pair<std::string, std::string>>{
           {"udp://a:1", "allowed are env://"},
           {"tcp://:29500", "host or port"},
           {"tcp://localhost", "host or port"},
           {"tcp://localhost:29500", "rank is missing"},
           {"tcp://localhost:29500?rank=0", "world_size is missing"},
           {"tcp://localhost:29500?size=2", "unknown parameter"},
           {"tcp://localhost:x?rank=0&world_size=1", "port in"},
           {"file://relative", "absolute path"},
           {"file:///no/such/folder/meet",
            "folder /no/such/folder does not exist"},
           {"file:///proc", "/proc is a folder"}}) {
    EXPECT_THAT(init_by(method),
                ThrowsMessage<std::invalid_argument>(HasSubstr(words)))
        << method;
  }
  EXPECT_THAT(
      [] {
        auto group =
            init_process_group("gloo", {.timeout = std::chrono::seconds(0)});
      },
      ThrowsMessage<std::invalid_argument>(HasSubstr("timeout is 0 ms")));
  EXPECT_THAT([] { auto group = init_process_group("goo"); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("goo")));
}

TEST(StoreSocket, ListensOnLoopbackOnlyOfEitherFamily) {
  for (auto [host, family] : {std::pair{"127.0.0.1", AF_INET},
                              {"localhost", AF_INET},
                              {"::1", AF_INET6}}) {
    if (family == AF_INET6 &&
        !std::filesystem::exists("/proc/sys/net/ipv6/conf/lo")) {
      continue;  // this kernel has no IPv6
    }
    auto socket = store_socket(host, 0);
    ASSERT_TRUE(socket) << host;
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    ASSERT_EQ(::getsockname(socket->get(),
                            reinterpret_cast<sockaddr*>(&address), &size),
              0);
    EXPECT_EQ(address.ss_family, family) << host;
  }
  EXPECT_FALSE(store_socket("192.0.2.1", 0));
  EXPECT_FALSE(store_socket("example.invalid", 0));
}

// A bug: if a signal interrupted the wait for a host that does not answer, the
// store was said to listen there.
TEST(StoreSocket, ASignalIsNotAnAnswer) {
  const auto listener = store_socket("127.0.0.1", 0);
  ASSERT_TRUE(listener);
  ASSERT_EQ(::listen(listener->get(), 0), 0);
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::getsockname(listener->get(), any, &size), 0);
  // This connection fills the listener's queue, so others get no answer.
  const FileDescriptor first(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(first.get(), any, size), 0);

  struct sigaction ignoring {};
  struct sigaction before {};
  ignoring.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGALRM, &ignoring, &before), 0);
  const itimerval often{.it_interval = {.tv_sec = 0, .tv_usec = 5'000},
                        .it_value = {.tv_sec = 0, .tv_usec = 5'000}};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
  const auto why =
      await_listener("127.0.0.1", ntohs(address.sin_port),
                     Deadline::after(std::chrono::milliseconds(200)));
  const itimerval never{};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &never, nullptr), 0);
  ASSERT_EQ(::sigaction(SIGALRM, &before, nullptr), 0);
  EXPECT_EQ(why, "Connection timed out");
}

}  // namespace
}  // namespace lockstep::internal
