// The workers' store over real sockets: workers of one node, whose agent has
// the keys, and of two nodes, whose agents pass the calls on to the host of the
// agents' store. What a worker does wrong must not harm another one, the agent
// or the agents' store.
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <random>
#include <thread>

#include "lockstep/base/endpoint.h"
#include "lockstep/base/packet_socket.h"
#include "lockstep/launch/agent/worker_store_service.h"
#include "lockstep/launch/nodes/store/store_client.h"
#include "lockstep/launch/nodes/store/store_server.h"
#include "lockstep/worker/worker_store_link.h"
#include "tests/harness/message_of.h"

namespace lockstep::internal::testing {
namespace {

using Kind = WorkerReply::Kind;
using Operation = WorkerCall::Operation;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

enum class Way { one_node, plain_nodes, tls_nodes };

size_t resident_bytes() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

Deadline soon() { return Deadline::after(seconds(20)); }

class WorkerStores : public ::testing::TestWithParam<Way> {
 protected:
  WorkerStores() {
    if (GetParam() != Way::one_node) start_server();
    start_round(0);
  }

  std::optional<std::string> secret() const {
    if (GetParam() != Way::tls_nodes) return std::nullopt;
    return "the secret of this job";
  }

  void start_server() {
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    FileDescriptor listener =
        bind_socket({reinterpret_cast<sockaddr*>(&any), sizeof(any)});
    ASSERT_EQ(::listen(listener.get(), 64), 0);
    address_.emplace(bound_address(listener.get()));
    auto [server, own] = socket_pair();
    server_.emplace(std::move(listener), std::move(server), secret());
    agent_.emplace(std::move(own), std::nullopt, soon());
  }

  static std::pair<FileDescriptor, FileDescriptor> socket_pair() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
  }

  // Two services if there are two nodes: the first node hosts the agents'
  // store.
  void start_round(int round) {
    services_.clear();
    names_.clear();
    const int nodes = GetParam() == Way::one_node ? 1 : 2;
    for (int node = 0; node < nodes; ++node) start_service(node, round);
  }

  std::shared_ptr<StoreLine> open_line() {
    FileDescriptor socket = connect_to(*address_, seconds(20));
    EXPECT_TRUE(socket);
    StoreClient client(std::move(socket), secret(), soon());
    return client.open_line(soon());
  }

  void start_service(int node, int round, bool line_is_renewed = false) {
    // The agents' names differ by process id.
    names_.push_back(WorkerStoreService::name_for(round, 29500) + "." +
                     std::to_string(node));
    std::shared_ptr<StoreLine> line;
    if (server_) line = open_line();
    services_.push_back(std::make_unique<WorkerStoreService>(
        names_.back(), round, std::move(line), line_is_renewed));
  }

  // Worker 0 is on the first node, worker 1 on the last.
  std::unique_ptr<WorkerStoreLink> worker(size_t number) {
    return std::make_unique<WorkerStoreLink>(names_.at(number % names_.size()),
                                             soon());
  }

  static void set(WorkerStoreLink& link, const std::string& key,
                  const std::string& value = "yes") {
    EXPECT_EQ(
        link.call({.operation = Operation::set, .key = key, .value = value},
                  soon())
            .kind,
        Kind::done);
  }
  static std::string get(WorkerStoreLink& link, const std::string& key) {
    return link.call({.operation = Operation::get, .key = key}, soon()).text;
  }

  // The store still serves those that keep to the rules, old and new.
  void expect_unharmed(WorkerStoreLink& before) {
    set(before, "alive");
    for (const size_t number : {0, 1}) {
      EXPECT_EQ(get(*worker(number), "alive"), "yes");
    }
    if (agent_) {
      agent_->set("alive", "agent");
      EXPECT_EQ(agent_->get("alive"), "agent");
    }
  }

  std::optional<SocketAddress> address_{};
  std::optional<StoreServer> server_{};
  std::optional<StoreClient> agent_{};
  std::vector<std::string> names_{};
  std::vector<std::unique_ptr<WorkerStoreService>> services_{};
};

std::string way_name(const ::testing::TestParamInfo<Way>& info) {
  if (info.param == Way::one_node) return "OneNode";
  return info.param == Way::plain_nodes ? "PlainNodes" : "TlsNodes";
}
INSTANTIATE_TEST_SUITE_P(, WorkerStores,
                         ::testing::Values(Way::one_node, Way::plain_nodes,
                                           Way::tls_nodes),
                         way_name);

TEST_P(WorkerStores, EveryOperationIsSeenByTheWorkersOfAllNodes) {
  auto first = worker(0);
  auto second = worker(1);
  const std::string bytes("\0value", 6);
  set(*first, "key", bytes);
  EXPECT_EQ(get(*second, "key"), bytes);
  EXPECT_TRUE(second->check({"key"}, soon()));
  EXPECT_FALSE(second->check({"key", "none"}, soon()));
  for (int turn = 1; turn <= 20; ++turn) {
    auto& link = turn % 2 == 0 ? first : second;
    EXPECT_EQ(
        link->call({.operation = Operation::add, .key = "sum", .number = 1},
                   soon())
            .number,
        turn);
  }
  const std::string large(kMostWorkerValueBytes, 'x');
  set(*first, "large", large);
  EXPECT_EQ(get(*second, "large"), large);
  EXPECT_EQ(second
                ->call({.operation = Operation::compare_set,
                        .key = std::string(kMostWorkerKeyBytes, 'k'),
                        .value = large,
                        .expected = ""},
                       soon())
                .text,
            large);
}

TEST_P(WorkerStores, WaitIsEndedByTheKeyAndNotByTime) {
  auto waiter = worker(0);
  auto other = worker(1);
  for (int turn = 0; turn < 50; ++turn) {
    const std::string key = "key " + std::to_string(turn);
    const Deadline watch = soon();
    std::thread setter([&] { set(*other, key); });
    EXPECT_TRUE(waiter->wait({key}, Deadline::after(seconds(60))));
    EXPECT_FALSE(watch.expired());
    setter.join();
  }
}

TEST_P(WorkerStores, ManyThreadsWaitAtOnceAndOthersGoOn) {
  constexpr int kWaiters = 24;
  auto first = worker(0);
  auto second = worker(1);
  std::atomic<int> told{0};
  std::vector<std::thread> waiters;
  for (int one = 0; one < kWaiters; ++one) {
    waiters.emplace_back([&, one] {
      auto& link = one % 2 == 0 ? *first : *second;
      link.call({.operation = Operation::add, .key = "ready", .number = 1},
                soon());
      EXPECT_TRUE(link.wait({"go", "and this"}, Deadline::after(seconds(60))));
      ++told;
    });
  }
  const auto ready = [&] {
    return first
        ->call({.operation = Operation::add, .key = "ready", .number = 0},
               soon())
        .number;
  };
  while (ready() < kWaiters) std::this_thread::sleep_for(milliseconds(1));
  const Deadline watch = soon();
  set(*second, "go");
  set(*second, "and this");
  for (auto& waiter : waiters) waiter.join();
  EXPECT_EQ(told, kWaiters);
  EXPECT_FALSE(watch.expired()) << "told by a time that passed";
}

TEST_P(WorkerStores, WaitThatIsGivenUpLosesNoReply) {
  auto link = worker(1);
  for (int turn = 1; turn <= 50; ++turn) {
    EXPECT_FALSE(link->wait({"never"}, Deadline::after(milliseconds(1))));
    EXPECT_EQ(
        link->call({.operation = Operation::add, .key = "turns", .number = 1},
                   soon())
            .number,
        turn);
  }
  // The key may come between the wait and the next call.
  auto other = worker(0);
  for (int turn = 0; turn < 50; ++turn) {
    const std::string key = std::to_string(turn);
    std::thread setter([&] { set(*other, key); });
    link->wait({key}, Deadline::after(milliseconds(turn % 3)));
    setter.join();
    EXPECT_EQ(get(*link, key), "yes");
  }
}

TEST_P(WorkerStores, ListsOfKeysOfAnyLengthAreWaitedFor) {
  auto link = worker(1);
  std::vector<std::string> keys;
  for (int key = 0; key < 200; ++key) {
    keys.push_back(std::to_string(key) + std::string(3000, 'k'));
    if (key > 0) set(*link, keys.back());
  }
  EXPECT_FALSE(link->check(keys, soon()));
  EXPECT_FALSE(link->wait(keys, Deadline::after(milliseconds(50))));
  set(*link, keys.front());
  EXPECT_TRUE(link->check(keys, soon()));
  EXPECT_TRUE(link->wait(keys, soon()));
  EXPECT_TRUE(link->wait({}, soon()));
}

TEST_P(WorkerStores, WhatIsTooLongIsAnErrorOfItsSender) {
  auto link = worker(0);
  EXPECT_THAT(message_of([&] {
                set(*link, "key", std::string(kMostWorkerValueBytes + 1, 'x'));
              }),
              HasSubstr("allowed are 122880"));
  EXPECT_THAT(message_of([&] {
                set(*link, std::string(kMostWorkerKeyBytes + 1, 'k'));
              }),
              HasSubstr("allowed are 4096"));
  expect_unharmed(*link);
}

TEST_P(WorkerStores, PlaceIsFreeWhenTheProcessThatHasItIsGone) {
  const auto claim = [](WorkerStoreLink& link, const std::string& name) {
    return link.call(
        {.operation = Operation::claim, .key = "rank 0", .value = name},
        soon());
  };
  auto first = worker(0);
  EXPECT_EQ(claim(*first, "pid 1").number, 1);
  auto second = worker(1);
  EXPECT_EQ(claim(*second, "pid 2").text, "pid 1");
  first.reset();
  const Deadline deadline = soon();
  WorkerReply reply;
  do {
    reply = claim(*second, "pid 2");
  } while (reply.kind == Kind::refused && !deadline.expired());
  EXPECT_EQ(reply.number, 2);
}

TEST_P(WorkerStores, KeysOfOneRoundAreNotThoseOfTheNext) {
  set(*worker(0), "key");
  auto left = worker(1);
  start_round(1);
  EXPECT_EQ(get(*worker(0), "key"), "");
  EXPECT_THROW(get(*left, "key"), WorkerStoreLost);
}

TEST_P(WorkerStores, EndOfTheAgentEndsEveryCall) {
  auto link = worker(1);
  std::thread waiting([&] {
    EXPECT_THAT(message_of([&] {
                  link->wait({"never"}, Deadline::after(seconds(60)));
                }),
                HasSubstr("the launcher's agent has closed the store"));
  });
  set(*link, "another call");
  services_.clear();
  waiting.join();
  EXPECT_THROW(get(*link, "key"), WorkerStoreLost);
  EXPECT_THAT(message_of([&] { worker(1); }),
              HasSubstr("cannot be reached (Connection refused)"));
}

TEST_P(WorkerStores, ProcessThatIsStoppedIsWaitedForUntilTheDeadline) {
  // Accepts nothing and answers nothing, as an agent that is stopped.
  const std::string name = names_.front() + ".stopped";
  const FileDescriptor listener = listen_at(name, SocketKind::stream);
  WorkerStoreLink link(name, soon());
  EXPECT_THAT(message_of([&] {
                link.call({.operation = Operation::get, .key = "key"},
                          Deadline::after(milliseconds(100)));
              }),
              HasSubstr("has not answered after 1"));
  EXPECT_FALSE(link.wait({"key"}, Deadline::after(milliseconds(100))));
}

// Sends `bytes` as a worker and returns whether the connection is closed then.
bool is_dropped(const std::string& name, const std::string& bytes) {
  const FileDescriptor socket = connect_to(name, SocketKind::stream);
  EXPECT_TRUE(socket);
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t count = send(socket.get(), bytes.data() + sent,
                               bytes.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno != EAGAIN) return true;
    if (count > 0) sent += static_cast<size_t>(count);
  }
  const Deadline deadline = soon();
  while (!deadline.expired()) {
    char answer[4096];
    const ssize_t got =
        recv(socket.get(), answer, sizeof(answer), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

TEST_P(WorkerStores, GarbageIsDroppedAndHarmsNobody) {
  auto before = worker(1);
  std::mt19937 random(7);
  std::vector<std::string> garbage{
      "GET / HTTP/1.1\r\n\r\n", std::string(4, '\0'), std::string(4, '\xff'),
      std::string("\0\0\0\x01\x09", 5),
      // The agents' own requests are none of a worker's.
      encode(Request{.operation = Request::Operation::for_round, .number = 0}),
      encode(Request{.operation = Request::Operation::worker_gone}),
      encode(Request{.operation = Request::Operation::set,
                     .key = "lockstep/job",
                     .value = "{}"}),
      with_length(bytes_of(WorkerCall{}) + "x")};
  for (int turn = 0; turn < 50; ++turn) {
    std::string bytes(1 + random() % 3000, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    bytes.replace(0, 4, std::string("\0\0\0\x20", 4));
    garbage.push_back(bytes + std::string(64, '\xff'));
  }
  for (const auto& bytes : garbage) {
    EXPECT_TRUE(is_dropped(names_.back(), bytes)) << bytes.substr(0, 40);
  }
  expect_unharmed(*before);
}

TEST_P(WorkerStores, KeysOfWorkersAreNotThoseOfAgents) {
  if (!agent_) GTEST_SKIP() << "with one node there are no agents' keys";
  agent_->set("lockstep/job", "record");
  for (const size_t number : {0, 1}) {
    EXPECT_EQ(get(*worker(number), "lockstep/job"), "");
  }
  for (const size_t number : {0, 1}) {
    set(*worker(number), "lockstep/job", "a worker's");
  }
  EXPECT_EQ(agent_->get("lockstep/job"), "record");
}

// A worker that never takes its replies must not hold up another one, nor cost
// without limit.
TEST_P(WorkerStores, WorkerThatTakesNoRepliesHoldsUpNobody) {
  auto before = worker(1);
  set(*before, "large", std::string(kMostWorkerValueBytes, 'x'));
  const FileDescriptor greedy = connect_to(names_.back(), SocketKind::stream);
  const std::string question =
      with_length(bytes_of({.operation = Operation::get, .key = "large"}));
  // Until nothing was taken for a while. The buffers of the system hold some
  // hundred questions.
  constexpr int kMost = 2'500;
  int asked = 0;
  Deadline idle = Deadline::after(milliseconds(300));
  while (asked < kMost && !idle.expired()) {
    if (send(greedy.get(), question.data(), question.size(),
             MSG_NOSIGNAL | MSG_DONTWAIT) > 0) {
      ++asked;
      idle = Deadline::after(milliseconds(300));
    }
  }
  EXPECT_LT(asked, kMost) << "the agent still reads";
  expect_unharmed(*before);
}

// A hundred workers that take no replies cost 790 MB.
TEST_P(WorkerStores, RepliesThatNobodyTakesAreBounded) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer keeps memory that was freed";
#endif
  constexpr int kWorkers = 100;
  constexpr int kQuestions = 64;
  auto before = worker(1);
  set(*before, "large", std::string(kMostWorkerValueBytes, 'x'));
  const std::string question =
      with_length(bytes_of({.operation = Operation::get, .key = "large"}));
  const size_t resident = resident_bytes();
  std::vector<FileDescriptor> greedy;
  for (int one = 0; one < kWorkers; ++one) {
    greedy.push_back(connect_to(names_.back(), SocketKind::stream));
    for (int asked = 0; asked < kQuestions; ++asked) {
      ASSERT_EQ(send(greedy.back().get(), question.data(), question.size(),
                     MSG_NOSIGNAL),
                static_cast<ssize_t>(question.size()));
    }
  }
  // Earlier requests have been answered by then.
  expect_unharmed(*before);
  EXPECT_LT(resident_bytes(), resident + (size_t{300} << 20));
}

TEST_P(WorkerStores, LossOfTheAgentsStoreEndsEveryCall) {
  if (!server_) GTEST_SKIP() << "with one node there is no agents' store";
  auto link = worker(1);
  std::thread waiting([&] {
    EXPECT_THROW(link->wait({"never"}, Deadline::after(seconds(60))),
                 WorkerStoreLost);
  });
  set(*link, "another call");
  server_.reset();
  waiting.join();
  EXPECT_THROW(get(*link, "key"), WorkerStoreLost);
}

// The death of one agent (its connection is closed) frees what its workers had,
// and the others go on.
// The agents meet at another store, and the workers do not notice it.
TEST_P(WorkerStores, CallsWaitForAnotherStore) {
  if (!server_) GTEST_SKIP() << "with one node there is no agents' store";
  start_service(2, 0, /*line_is_renewed=*/true);
  const auto link = std::make_unique<WorkerStoreLink>(names_.back(), soon());
  set(*link, "earlier");
  std::thread waits([&] { EXPECT_TRUE(link->wait({"later"}, soon())); });
  agent_.reset();
  server_.reset();
  std::thread asks([&] { EXPECT_EQ(get(*link, "earlier"), ""); });
  const auto joined = std::make_unique<WorkerStoreLink>(names_.back(), soon());
  std::this_thread::sleep_for(milliseconds(20));  // for no test to wait for
  start_server();
  services_.back()->renew(open_line());
  asks.join();
  set(*joined, "later");
  waits.join();
}

TEST_P(WorkerStores, EndOfOneAgentIsThatOfItsWorkersOnly) {
  if (!server_) GTEST_SKIP() << "one node has one agent";
  auto first = worker(0);
  auto second = worker(1);
  // Both agents have come to the round, which ends with the last of them.
  set(*first, "here");
  second->call({.operation = Operation::claim, .key = "rank 1", .value = "a"},
               soon());
  services_.pop_back();
  set(*first, "key");
  const Deadline deadline = soon();
  WorkerReply reply;
  do {
    reply = first->call(
        {.operation = Operation::claim, .key = "rank 1", .value = "b"}, soon());
  } while (reply.kind == Kind::refused && !deadline.expired());
  EXPECT_EQ(reply.number, 2);
}

TEST_P(WorkerStores, RoundThatIsOverIsRefused) {
  if (!server_) GTEST_SKIP() << "with one node a round ends with its service";
  // Node 1 is still in round 0 when node 0 begins the next one.
  auto late = worker(1);
  EXPECT_EQ(get(*late, "key"), "");
  start_service(0, 1);
  auto next = std::make_unique<WorkerStoreLink>(names_.back(), soon());
  set(*next, "key");
  EXPECT_EQ(get(*late, "key"), "") << "the rounds have keys of their own";
  start_service(2, 0);
  // The service ends as soon as it has heard that it is late.
  EXPECT_THROW(
      {
        WorkerStoreLink refused(names_.back(), soon());
        get(refused, "key");
      },
      WorkerStoreLost);
}

TEST(WorkerStoreLinks, ForkedProcessMayNotUseThem) {
  const std::string name = WorkerStoreService::name_for(0, 1);
  const WorkerStoreService service(name, 0, nullptr);
  WorkerStoreLink link(name, soon());
  const pid_t child = fork();
  if (child == 0) {
    const std::string text = message_of([&] {
      link.call({.operation = Operation::get, .key = "key"}, soon());
    });
    _exit(text.find("forked from a rank") != text.npos ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace lockstep::internal::testing
