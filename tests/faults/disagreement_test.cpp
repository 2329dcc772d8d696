// Ranks that do different things: faults 11, 12 and 13 of
// docs/faults.md.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "lockstep/base/deadline.h"
#include "tests/faults/job.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// A world whose ranks were started wrongly.
class Places : public WaysTest {
 protected:
  // Starts ranks 0, 1 and 2 of 3; `wrong` replaces the environment of the last
  // one.
  Job& start(const std::vector<std::string>& wrong) {
    auto& job = make_job(GetParam(), 3);
    job.environment = [wrong](int rank) {
      return rank == 2 ? wrong : std::vector<std::string>{};
    };
    job.start("shared", {"timeout=3000"});
    return job;
  }
};

TEST_P(Places, AnotherWorldSizeIsRefusedWithBothNamed) {
  auto& job = start({"WORLD_SIZE=4"});
  job.await("refused");
  // The rank that came first decides which of the two sizes is named as the
  // other one. Rank 0 fails in either case, and its store with it, so all ranks
  // fail.
  EXPECT_THAT(job.said(0, "refused"),
              AllOf(AnyOf(HasSubstr("rank 2 was"), HasSubstr("rank 1 was"),
                          HasSubstr("rank 0 was")),
                    HasSubstr("world size 4"), HasSubstr("world size 3")));
}

TEST_P(Places, TwoEqualRanksAreRefusedAndNamed) {
  auto& job = start({"RANK=1"});
  // The rank that came second is refused, and then all others.
  job.rank(0).await_output("refused 0 ");
  EXPECT_THAT(job.said(0, "refused"),
              AllOf(HasSubstr("rank 1"), HasSubstr("two processes")));
  for (int rank : {1, 2}) {
    job.rank(rank).await_output("refused 1 ");
    EXPECT_THAT(job.rank(rank).out(), HasSubstr("rank 1"));
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, Places, ::testing::Values(kOneHost, kGloo),
                         way_name);

// Ranks that make different calls.
using CallsBetweenHosts = FaultsTest;

class Calls : public WaysTest {
 protected:
  static constexpr int kOdd = 1;

  Job& start(const std::string& scenario, std::vector<std::string> arguments) {
    auto& job = make_job(GetParam(), GetParam().hosts == 2 ? 4 : 3);
    job.environment = [this](int) {
      return std::vector<std::string>{"LOCKSTEP_FLIGHT_DIR=" +
                                      folder().string()};
    };
    arguments.push_back("odd=" + std::to_string(kOdd));
    arguments.insert(arguments.end(), {"timeout=1500", "together=1"});
    job.start(scenario, arguments);
    return job;
  }
  fs::path folder() const { return scratch() / "flight"; }

  // Returns the complete records: until it is complete, a record has another
  // name.
  std::vector<std::string> records() const {
    std::vector<std::string> whole;
    std::error_code not_made_yet;
    for (const auto& file : fs::directory_iterator(folder(), not_made_yet)) {
      if (file.path().extension() == ".json") whole.push_back(file.path());
    }
    return whole;
  }

  // Returns what `lockstep inspect flight` finds in the records of the default
  // group.
  json inspect() {
    std::vector<std::string> arguments{"inspect", "flight", "--json"};
    for (const auto& record : records()) arguments.push_back(record);
    const auto result = run_command(arguments);
    EXPECT_EQ(result.exit_code, 1) << result.out << result.err;
    return json::parse(result.out).at("groups").at(0);
  }
};

TEST_P(Calls, ThatDifferFailOnEveryRankWithAllDescriptions) {
  const std::pair<const char*, const char*> odd[] = {
      {"all_reduce", "1001"},
      {"all_reduce", "Int"},
      {"all_reduce", "MAX"},
      {"broadcast", "1000"},
  };
  auto& job = start("disagree", {"calls=4"});
  job.await("done");  // the group still works
  for (int rank = 0; rank < job.size(); ++rank) {
    const auto failures = job.all_said(rank, "failed");
    ASSERT_EQ(failures.size(), std::size(odd));
    for (size_t call = 0; call < failures.size(); ++call) {
      const auto& text = failures[call];
      SCOPED_TRACE(text);
      EXPECT_THAT(text, HasSubstr("disagree"));
      const auto own = text.find("(rank");
      const auto other = text.find("rank 1: ");
      ASSERT_NE(own, text.npos);
      ASSERT_NE(other, text.npos);
      EXPECT_THAT(text.substr(other), AllOf(HasSubstr(odd[call].first),
                                            HasSubstr(odd[call].second)));
      EXPECT_THAT(text.substr(own),
                  AllOf(HasSubstr("all_reduce"), HasSubstr("SUM"),
                        HasSubstr("Float"), HasSubstr("1000")));
    }
  }
}

TEST_P(Calls, OneOfWhichIsLeftOutMeetAnotherAndAreRecorded) {
  auto& job = start("skip", {});
  job.await("failed");
  for (int rank = 0; rank < job.size(); ++rank) {
    const auto text = job.said(rank, "failed");
    EXPECT_THAT(
        text, AllOf(HasSubstr("#2"), ContainsRegex("ranks? 0[^:]*: all_reduce"),
                    HasSubstr("rank 1: broadcast")));
    EXPECT_THAT(text, HasSubstr("flight record: " + folder().string()));
  }
  const auto group = inspect();
  EXPECT_EQ(group.at("verdict"), "mismatch") << group;
  EXPECT_EQ(group.at("collective_seq_id"), 2);
  EXPECT_EQ(group.at("diverged_ranks"), json({kOdd}));
}

TEST_P(Calls, TheLastOfWhichIsLeftOutNameTheRankWithItsLastCall) {
  auto& job = start("behind", {});
  job.await("failed", kOdd);
  for (int rank = 0; rank < job.size(); ++rank) {
    if (rank == kOdd) continue;
    const auto text = job.said(rank, "failed");
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1"), HasSubstr("all_reduce #4")));
    if (!GetParam().detail) {
      EXPECT_THAT(text, HasSubstr("all_reduce #3"));
    }
  }
  // The odd rank has not failed, so the test asks it for its record.
  job.rank(kOdd).signal(SIGUSR1);
  const auto deadline = Deadline::after(seconds(10));
  while (std::ssize(records()) < job.size() && !deadline.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const auto group = inspect();
  EXPECT_EQ(group.at("verdict"), "absent") << group;
  EXPECT_EQ(group.at("collective_seq_id"), 4);
  EXPECT_EQ(group.at("diverged_ranks"), json({kOdd}));
}

INSTANTIATE_TEST_SUITE_P(Ways, Calls,
                         ::testing::Values(kOneHost, kTwoHostsDetail,
                                           kGlooDetail),
                         way_name);

// Between hosts no calls are compared by default, but within each host they
// are. There the ranks notice the difference, and make the others fail.
TEST_F(CallsBetweenHosts, ThatDifferFailOnEveryRank) {
  for (const char* scenario : {"skip", "disagree"}) {
    SCOPED_TRACE(scenario);
    auto& job = make_job(kTwoHosts, 4);
    job.start(scenario, {"odd=1", "calls=1"});
    job.await("failed");
    for (int rank : {0, 1}) {
      EXPECT_THAT(job.said(rank, "failed"),
                  AllOf(HasSubstr("disagree"), HasSubstr("rank 0"),
                        HasSubstr("rank 1")));
    }
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
