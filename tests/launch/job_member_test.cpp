// The thread of an agent that takes part in a job of several nodes, with a
// store in this process.
#include "lockstep/launch/nodes/job_member.h"

#include <gmock/gmock.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <utility>

#include "lockstep/base/deadline.h"
#include "tests/harness/free_port.h"
#include "tests/launch/memory_agent_store.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

SocketAddress on_loopback(int port) {
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  any.sin_port = htons(static_cast<uint16_t>(port));
  return {reinterpret_cast<sockaddr*>(&any), sizeof(any)};
}

class JobMemberTest : public ::testing::Test {
 protected:
  // Node rank 0 hosts the store. The store is in memory, but its socket is
  // real.
  std::unique_ptr<JobMember> member(int node_rank, int nnodes = 2,
                                    seconds join_timeout = seconds(20)) {
    JobMemberOptions options;
    options.node.nnodes = nnodes;
    options.node.min_nodes = min_nodes_.value_or(nnodes);
    options.node.node_rank = node_rank;
    options.node.host = "host" + std::to_string(node_rank);
    options.store.endpoint = {endpoint_host_, port_};
    options.store.is_host = node_rank == 0;
    options.first_notice = milliseconds(100);
    options.notice_interval = milliseconds(200);
    options.store.timeout = join_timeout;
    options.join_timeout = join_timeout;
    options.store.open = [this](const AgentStoreAddress& address) {
      if (address.listen_fd >= 0) {
        listening_ = FileDescriptor(address.listen_fd);
      } else if (lost_while_joining_ > 0) {
        --lost_while_joining_;
        return std::make_unique<MemoryAgentStore>(keys_, operations_);
      }
      return std::make_unique<MemoryAgentStore>(keys_);
    };
    return std::make_unique<JobMember>(options);
  }

  template <typename Event>
  static Event await(JobMember& job) {
    const Deadline deadline = Deadline::after(seconds(20));
    while (!deadline.expired()) {
      if (auto event = job.take_event()) {
        if (auto* wanted = std::get_if<Event>(&*event)) return *wanted;
        continue;
      }
      pollfd entry{job.event_fd(), POLLIN, 0};
      poll(&entry, 1, static_cast<int>(deadline.remaining().count()));
    }
    ADD_FAILURE() << "the event did not come";
    return {};
  }

  int port_ = free_port();
  std::optional<int> min_nodes_{};
  std::shared_ptr<StoredKeys> keys_ = std::make_shared<StoredKeys>();
  FileDescriptor listening_;
  std::string endpoint_host_ = "127.0.0.1";
  // How many connections are lost while an agent joins, and after how many
  // operations each. The first three operations ask whether the job has ended,
  // write the job and take the node rank.
  std::atomic<int> lost_while_joining_{0};
  int operations_ = 3;
};

TEST_F(JobMemberTest, TwoMembersGoThroughARestartAndSucceed) {
  auto host = member(0);
  EXPECT_EQ(await<Joined>(*host).reachable_host, "127.0.0.1");
  auto other = member(1);
  EXPECT_EQ(await<Joined>(*other).membership.node_rank, 1);
  host->offer_round(0, {"127.0.0.1", 4000});
  other->offer_round(0, {});
  EXPECT_EQ(await<RoundPlan>(*host).place.world_size, 2);
  EXPECT_EQ(await<RoundPlan>(*other).master_port, 4000);
  host->report_success();
  other->report_success();
  EXPECT_EQ(await<Verdict>(*host).kind, Verdict::Kind::succeeded);
  EXPECT_EQ(await<Verdict>(*other).kind, Verdict::Kind::succeeded);
}

TEST_F(JobMemberTest, AbsentNodeIsNamedWhenTheTimeIsUp) {
  auto host = member(0, 3, seconds(1));
  await<Joined>(*host);
  host->offer_round(0, {"127.0.0.1", 4000});
  const auto verdict = await<Verdict>(*host);
  EXPECT_EQ(verdict.exit_code, 1);
  EXPECT_THAT(verdict.text,
              AllOf(HasSubstr("waited 1 s"), HasSubstr("absent: nodes 1 and 2"),
                    HasSubstr("127.0.0.1:" + std::to_string(port_))));
}

TEST_F(JobMemberTest, AbsentNodeIsNamedNowAndThenWhileItIsAwaited) {
  auto host = member(0, 3);
  await<Joined>(*host);
  host->offer_round(0, {"127.0.0.1", 4000});
  for (int notice = 0; notice < 3; ++notice) {
    EXPECT_THAT(await<Notice>(*host).text,
                HasSubstr("waiting for nodes 1 and 2 of 3, for at most 20 s"));
  }
  auto other = member(1, 3);
  await<Joined>(*other);
  other->offer_round(0, {});
  const Deadline deadline = Deadline::after(seconds(20));
  while (await<Notice>(*host).text.find("waiting for node 2 of") ==
         std::string::npos) {
    ASSERT_FALSE(deadline.expired());
  }
}

TEST_F(JobMemberTest, BelowMinALineSaysNowAndThenHowManyNodesThereAre) {
  min_nodes_ = 2;
  auto host = member(0, 3, seconds(2));
  await<Joined>(*host);
  host->offer_round(0, {"127.0.0.1", 4000});
  for (int notice = 0; notice < 3; ++notice) {
    EXPECT_THAT(await<Notice>(*host).text,
                HasSubstr("waiting for 2 to 3 nodes, of which 1 has come, for "
                          "at most 2 s"));
  }
  const auto verdict = await<Verdict>(*host);
  EXPECT_EQ(verdict.kind, Verdict::Kind::given_up);
  EXPECT_THAT(verdict.text, HasSubstr("waited 2 s"));
}

TEST_F(JobMemberTest, LostStoreNamesTheNodeThatHostedIt) {
  auto host = member(0);
  await<Joined>(*host);
  auto other = member(1);
  await<Joined>(*other);
  {
    const std::lock_guard lock(keys_->mutex);
    keys_->lost = true;
  }
  const auto verdict = await<Verdict>(*other);
  EXPECT_EQ(verdict.kind, Verdict::Kind::given_up);
  EXPECT_THAT(verdict.text, HasSubstr("node 0 (host0) was lost"));
}

TEST_F(JobMemberTest, LostStoreLeadsToTheNextEndpoint) {
  const int port = free_port();
  const auto there = std::make_shared<StoredKeys>();
  JobMemberOptions options;
  options.node.nnodes = 3;
  options.node.min_nodes = 1;
  options.node.elastic_options.last_call = milliseconds(0);
  options.store.endpoint = {"127.0.0.1", port_};
  options.further_endpoints = {{"127.0.0.1", port}};
  options.store.open = [&](const AgentStoreAddress& address) {
    listening_ = FileDescriptor(address.listen_fd);
    return std::make_unique<MemoryAgentStore>(address.port == port ? there
                                                                   : keys_);
  };
  JobMember job(options);
  await<Joined>(job);
  job.offer_round(0, {"127.0.0.1", 4000});
  EXPECT_EQ(await<RoundPlan>(job).place.nnodes, 1);
  {
    const std::lock_guard lock(keys_->mutex);
    keys_->lost = true;
  }
  const auto verdict = await<Verdict>(job);
  EXPECT_TRUE(verdict.moves);
  EXPECT_EQ(verdict.kind, Verdict::Kind::node_lost);
  EXPECT_EQ(verdict.changes.membership_changes, 1);
  EXPECT_THAT(verdict.text,
              HasSubstr("the nodes meet at 127.0.0.1:" + std::to_string(port)));
  // A bug: what an agent wanted of the lost store was done at the next one, if
  // it had been joined there before the agent heard of it.
  pollfd event{job.event_fd(), POLLIN, 0};
  ASSERT_EQ(poll(&event, 1, 20'000), 1);
  job.offer_round(7, {"127.0.0.1", 4007});
  job.report_success();
  const auto joined = await<Joined>(job);
  EXPECT_EQ(joined.membership.round, 1);
  EXPECT_EQ(joined.membership.changes.membership_changes, 1);
  job.offer_round(1, {"127.0.0.1", 4001});
  const auto plan = await<RoundPlan>(job);
  EXPECT_EQ(plan.round, 1);
  EXPECT_EQ(plan.restarts_used, 0);
  const std::lock_guard lock(there->mutex);
  for (const auto& [key, value] : there->values) {
    EXPECT_THAT(key, ::testing::Not(HasSubstr("round/7")));
  }
  for (const auto& [key, number] : there->counters) {
    EXPECT_TRUE(number == 0 || !key.ends_with("succeeded")) << key;
  }
}

// A job that has moved to the second endpoint is found there, but one that is
// ending there is not joined: the next job begins at the first endpoint.
TEST_F(JobMemberTest, NewAgentGoesToTheStoreOfAJobThatHasMoved) {
  const FileDescriptor second = bind_socket(on_loopback(0));
  ASSERT_EQ(::listen(second.get(), 64), 0);
  const int port = bound_address(second.get()).port();
  const auto there = std::make_shared<StoredKeys>();
  for (const bool ending : {false, true}) {
    if (ending) there->values["lockstep/closed"] = "1";
    JobMemberOptions options;
    options.node.nnodes = 3;
    options.store.endpoint = {"127.0.0.1", port_};
    options.further_endpoints = {{"127.0.0.1", port}};
    options.store.open = [&](const AgentStoreAddress& address) {
      if (address.listen_fd >= 0) {
        listening_ = FileDescriptor(address.listen_fd);
      }
      return std::make_unique<MemoryAgentStore>(address.port == port ? there
                                                                     : keys_);
    };
    JobMember job(options);
    EXPECT_EQ(await<Joined>(job).hosts_store, ending);
  }
}

// This happens with the store of the previous job, whose host lingers for a
// moment.
TEST_F(JobMemberTest, StoreLostWhileJoiningIsTriedAgainWithTheSameRank) {
  auto host = member(0);
  await<Joined>(*host);
  lost_while_joining_ = 2;
  auto other = member(1);
  EXPECT_EQ(await<Joined>(*other).membership.node_rank, 1);
  EXPECT_EQ(lost_while_joining_, 0);
}

TEST_F(JobMemberTest, StoreLostInEveryTryToJoinIsNamed) {
  auto host = member(0);
  await<Joined>(*host);
  lost_while_joining_ = 1'000'000;
  operations_ = 0;
  auto other = member(1, 2, seconds(1));
  EXPECT_THAT(await<Verdict>(*other).text,
              AllOf(HasSubstr("127.0.0.1:" + std::to_string(port_)),
                    HasSubstr("was lost")));
}

// A host's own name may mean a loopback address on that host, but only there.
TEST_F(JobMemberTest, OtherNodesAreNotGivenALoopbackAddress) {
  endpoint_host_ = "127.1";  // resolved like a name
  auto host = member(0);
  const auto hosting = await<Joined>(*host);
  EXPECT_EQ(hosting.reachable_host, "127.1");
  EXPECT_EQ(hosting.master_addr, "") << "each as it was told";
  auto other = member(1);
  EXPECT_EQ(await<Joined>(*other).reachable_host, "127.1");
  host->offer_round(0, {"", 4000});
  other->offer_round(0, {});
  EXPECT_EQ(await<RoundPlan>(*other).master_addr, "127.1");
}

// A stopped process that hosts the store behaves like this: its kernel accepts.
TEST_F(JobMemberTest, MemberEndsWhereAStoreAcceptsAndNeverAnswers) {
  const SocketAddress address = on_loopback(port_);
  const FileDescriptor silent = bind_socket(address);
  ASSERT_EQ(::listen(silent.get(), 64), 0);
  JobMemberOptions options;
  options.node.nnodes = 2;
  options.node.node_rank = 1;
  options.store.endpoint = {"127.0.0.1", port_};
  options.store.is_host = false;
  std::promise<void> opening;
  std::atomic<bool> told{false};
  // Acts like c10d's client: waits without limit for an answer, and connects
  // again until its timeout.
  options.store.open =
      [&](const AgentStoreAddress& store) -> std::unique_ptr<AgentStore> {
    if (!told.exchange(true)) opening.set_value();
    const Deadline deadline = Deadline::after(store.timeout);
    while (!deadline.expired()) {
      const FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      char answer = 0;
      if (::connect(fd.get(), address.get(), address.length()) == 0) {
        EXPECT_LE(read(fd.get(), &answer, 1), 0);
      }
    }
    throw AgentStoreError("no answer");
  };
  auto job = std::make_unique<JobMember>(options);
  opening.get_future().wait();
  const Deadline watch = Deadline::after(seconds(12));
  job.reset();
  EXPECT_FALSE(watch.expired());
}

TEST_F(JobMemberTest, MemberThatLeavesWritesWhatWasQueued) {
  auto host = member(0);
  await<Joined>(*host);
  auto other = member(1);
  await<Joined>(*other);
  Verdict verdict;
  verdict.kind = Verdict::Kind::given_up;
  verdict.exit_code = 9;
  other->propose(0, verdict);
  other.reset();
  EXPECT_EQ(await<Verdict>(*host).exit_code, 9);
}

TEST_F(JobMemberTest, WaitForAStoreThatNeverComesEndsWithTheMember) {
  const Deadline watch = Deadline::after(seconds(10));
  auto single = member(1);
  single.reset();
  EXPECT_FALSE(watch.expired());
}

TEST_F(JobMemberTest, StoreThatNeverComesIsNamed) {
  auto single = member(1, 2, seconds(1));
  EXPECT_THAT(await<Verdict>(*single).text,
              AllOf(HasSubstr("127.0.0.1:" + std::to_string(port_)),
                    HasSubstr("no process listens there")));
}

}  // namespace
}  // namespace lockstep::internal::testing
