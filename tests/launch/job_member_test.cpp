// The thread behind an agent of several nodes, with a store in this process.
#include "lockstep/launch/job_member.h"

#include <gmock/gmock.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "lockstep/base/deadline.h"
#include "tests/launch/memory_agent_store.h"

namespace lockstep::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

int free_port() {
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const FileDescriptor fd = bind_socket(
      SocketAddress(reinterpret_cast<sockaddr*>(&any), sizeof(any)));
  return bound_address(fd.get()).port();
}

class JobMemberTest : public ::testing::Test {
 protected:
  // Node rank 0 hosts; the store itself is in memory, the socket is not.
  std::unique_ptr<JobMember> member(int node_rank, int nnodes = 2,
                                    seconds join_timeout = seconds(20)) {
    JobMemberOptions options;
    options.node.nnodes = nnodes;
    options.node.node_rank = node_rank;
    options.node.host = "host" + std::to_string(node_rank);
    options.store.endpoint = {"127.0.0.1", port_};
    options.store.is_host = node_rank == 0;
    options.store.timeout = join_timeout;
    options.join_timeout = join_timeout;
    return std::make_unique<JobMember>(
        options, [this](const AgentStoreAddress& address) {
          if (address.listen_fd >= 0) {
            listening_ = FileDescriptor(address.listen_fd);
          }
          return std::make_unique<MemoryAgentStore>(keys_);
        });
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
  std::shared_ptr<StoredKeys> keys_ = std::make_shared<StoredKeys>();
  FileDescriptor listening_;
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
  auto lonely = member(1);
  lonely.reset();
  EXPECT_FALSE(watch.expired());
}

TEST_F(JobMemberTest, StoreThatNeverComesIsNamed) {
  auto lonely = member(1, 2, seconds(1));
  EXPECT_THAT(await<Verdict>(*lonely).text,
              AllOf(HasSubstr("127.0.0.1:" + std::to_string(port_)),
                    HasSubstr("nobody listens there")));
}

}  // namespace
}  // namespace lockstep::testing
