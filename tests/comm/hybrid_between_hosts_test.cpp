// The backend "lockstep" over hosts that are really separate: what it finds out
// by itself, its results, and what remains of a rank that dies on the other
// host.
#include <gmock/gmock.h>
#include <signal.h>

#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "tests/faults/job.h"
#include "tests/harness/network_hosts.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

class HybridBetweenHosts : public FaultsTest {
 protected:
  void SetUp() override {
    if (!hosts_.made()) GTEST_SKIP() << hosts_.obstacle();
  }

  // Starts `first` ranks on one host and the others on the other.
  Job& make(int first, int size) {
    auto& job = make_job(kOneHost, size);
    job.prefix = [this, first](int rank) {
      return hosts_.command_on(rank < first ? 0 : 1);
    };
    job.environment = [](int) {
      return std::vector<std::string>{"MASTER_ADDR=" +
                                      NetworkHosts::address(0)};
    };
    return job;
  }

  // Returns how many groups of ranks share memory: the number of segments that
  // these processes map.
  static size_t segments(Job& job) {
    std::set<std::string> inodes;
    for (int rank = 0; rank < job.size(); ++rank) {
      const auto maps =
          read_file("/proc/" + std::to_string(job.rank(rank).pid()) + "/maps");
      for (const auto& line : lines(maps)) {
        if (line.find("/memfd:lockstep") == line.npos) continue;
        std::istringstream words(line);
        std::string word;
        for (int i = 0; i < 5; ++i) words >> word;
        inodes.insert(word);
      }
    }
    return inodes.size();
  }

  NetworkHosts hosts_;
};

TEST_F(HybridBetweenHosts, EveryOperationIsRightForUnevenHosts) {
  for (const auto& [first, size] : {std::pair{3, 5}, {1, 3}, {2, 4}}) {
    SCOPED_TRACE(std::to_string(first) + " of " + std::to_string(size) +
                 " ranks on the first host");
    auto& job = make(first, size);
    job.start("storm", {"turns=300", "seed=" + std::to_string(seed()), "end=1",
                        "leave=1"});
    for (int rank = 0; rank < size; ++rank) {
      const auto result = job.rank(rank).finish(seconds(60));
      EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
    }
  }
}

TEST_F(HybridBetweenHosts, RanksOfAHostShareMemory) {
  auto& job = make(3, 5);
  job.start("loop");
  job.await("ready");
  EXPECT_EQ(segments(job), 2u);
}

TEST_F(HybridBetweenHosts, ARankThatIsKilledFailsTheOthersOnBothHosts) {
  std::mt19937 random(seed());
  for (const int victim : {3, 2, 1}) {
    SCOPED_TRACE(victim);
    auto& job = make(2, 4);
    job.start("loop");
    job.await("ready");
    std::this_thread::sleep_for(milliseconds(random() % 100));
    job.rank(victim).signal(SIGKILL);
    job.await("failed", victim, seconds(5));
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == victim || rank / 2 != victim / 2) continue;
      EXPECT_THAT(job.said(rank, "failed"),
                  HasSubstr("rank " + std::to_string(victim) + " "));
    }
  }
}

TEST_F(HybridBetweenHosts, ThatAreUnpluggedFailAtTheDeadline) {
  auto& job = make(2, 4);
  job.start("loop", {"timeout=2000"});
  job.await("ready");
  ASSERT_TRUE(hosts_.unplug());
  job.await("failed", -1, seconds(10));
}

}  // namespace
}  // namespace lockstep::internal::testing
