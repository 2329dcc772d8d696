// Ranks that die, fail or leave outside of a collective, and how their peers
// and the launcher learn of it. Deadlines are minutes long, so what a test sees
// in time was caused by the event, not by a timeout.
#include <gmock/gmock.h>
#include <signal.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/faults/job.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// Far below the five minutes of the operations themselves, with room for a busy
// machine.
constexpr seconds kSoon{10};

class Departures : public WaysTest {
 protected:
  static constexpr int kSize = 3;

  Job& make() {
    job_ = &make_job(GetParam(), GetParam().hosts == 2 ? 4 : kSize);
    job_->program = "faults_departing";
    return *job_;
  }
  static std::vector<std::string> odd(int rank) {
    return {"odd=" + std::to_string(rank)};
  }
  void expect_all_say(const std::string& word, const std::string& text,
                      int but) {
    job_->await(word, but, kSoon);
    for (int rank = 0; rank < job_->size(); ++rank) {
      if (rank == but) continue;
      EXPECT_THAT(job_->said(rank, word), HasSubstr(text));
    }
  }

  // Sets the path of the file that the ranks wait for.
  void give_go_file(Job& job) {
    go_ = scratch() / "go";
    std::filesystem::remove(go_);
    job.environment = [go = go_](int) {
      return std::vector<std::string>{"LOCKSTEP_TEST_GO=" + go.string()};
    };
  }

  Job* job_ = nullptr;
  std::filesystem::path go_{};
};

// Each test kills a rank in the middle, and the rank that has the store.
TEST_P(Departures, ARankThatDiedBeforeNewGroupIsNamed) {
  for (const int victim : {1, 0}) {
    SCOPED_TRACE(victim);
    make().start("new_group", odd(victim));
    expect_all_say("failed", "rank " + std::to_string(victim) + " died",
                   victim);
  }
}

TEST_P(Departures, ARankThatDiedInNewGroupIsNamed) {
  for (const int victim : {1, 0}) {
    SCOPED_TRACE(victim);
    auto& job = make();
    give_go_file(job);
    job.start("enters", odd(victim));
    job.await("ready", victim);
    job.rank(victim).await_output("waiting " + std::to_string(victim));
    job.rank(victim).signal(SIGKILL);
    job.rank(victim).finish();
    const std::ofstream go(go_);
    expect_all_say("failed", "rank " + std::to_string(victim) + " died",
                   victim);
  }
}

TEST_P(Departures, ARankThatDiedBeforeARollCallIsNamed) {
  for (const int victim : {1, 0}) {
    SCOPED_TRACE(victim);
    make().start("monitored", odd(victim));
    expect_all_say("failed", "rank " + std::to_string(victim) + " died",
                   victim);
  }
}

TEST_P(Departures, ARankThatDiedWhileTheRanksMeetIsNamed) {
  auto& job = make();
  const auto store = scratch() / "store";
  job.environment = [&](int) {
    return std::vector<std::string>{"LOCKSTEP_TEST_STORE=" + store.string()};
  };
  if (std::string(GetParam().backend) == "gloo") {
    GTEST_SKIP() << "Gloo's ranks do not say where they run";
  }
  job.start("meeting", odd(1));
  expect_all_say("refused", "rank 1 died", 1);
}

TEST_P(Departures, ARankThatLeftIsNamedByARollCall) {
  auto& job = make();
  give_go_file(job);
  job.start("absent", odd(1));
  expect_all_say("failed", "rank 1 has left the group", 1);
}

// The rank that leaves waits until its peers leave, too.
TEST_P(Departures, ARankThatLeavesIsNoticedBeforeItHasWaitedForItsPeers) {
  auto& job = make();
  give_go_file(job);
  job.start("leaves", odd(1));
  job.await("failed", 1, kSoon);
  for (int rank = 0; rank < job.size(); ++rank) {
    if (rank == 1) continue;
    EXPECT_THAT(job.said(rank, "failed"), HasSubstr("rank 1"));
  }
  const std::ofstream go(go_);
  job.rank(1).await_output("left 1 after its peers knew");
}

INSTANTIATE_TEST_SUITE_P(Ways, Departures,
                         ::testing::Values(kOneHost, kOneHostDetail, kTwoHosts,
                                           kGloo, kGlooDetail),
                         way_name);

// How a failure is reported: in lines on stderr, and in the file that the
// launcher reads.
class Reports : public FaultsTest {
 protected:
  static constexpr int kSize = 3;
  static constexpr int kOdd = 1;

  void run_job(const std::string& scenario, Way way = kOneHost) {
    job_ = &make_job(way, kSize);
    job_->program = "faults_departing";
    job_->environment = [this](int rank) {
      return std::vector<std::string>{"TORCHELASTIC_ERROR_FILE=" +
                                      file(rank).string()};
    };
    job_->start(scenario, {"odd=1"});
    for (int rank = 0; rank < kSize; ++rank) {
      results_.push_back(job_->rank(rank).finish(kSoon));
    }
  }
  std::filesystem::path file(int rank) const {
    return scratch() / ("error" + std::to_string(rank) + ".json");
  }
  static constexpr const char* kCause =
      "cause: std::runtime_error: no such file: numbers.csv";
  // Returns what the rank's file says, such as "cause: no such file".
  std::string written(int rank) const {
    std::ifstream stream(file(rank));
    if (!stream) return "nothing";
    const auto message = nlohmann::json::parse(stream).at("message");
    return message.at("extraInfo").at("kind").get<std::string>() + ": " +
           message.at("message").get<std::string>();
  }
  // Returns the lines without the warnings that LibTorch prints, each with its
  // stack, to a rank that asks the store how another went at the moment in
  // which the store's host ends. There may be several or none.
  static std::vector<std::string> own_lines(std::string err) {
    size_t begin = 0;
    while ((begin = err.find("[W", begin)) != err.npos) {
      EXPECT_THAT(err.substr(begin),
                  ContainsRegex("^\\[W[^\n]*\\[c10d\\] "
                                "[A-Za-z]+ failed on Socket"));
      const auto end = err.find("\nrank ", begin);
      err.erase(begin, end == err.npos ? err.npos : end + 1 - begin);
    }
    return lines(err);
  }
  void expect_echoes() {
    for (const int rank : {0, 2}) {
      EXPECT_THAT(written(rank),
                  ContainsRegex("^echo: all_reduce #.*rank [012] "
                                "(died|left|has left|failed)"));
    }
  }

  Job* job_ = nullptr;
  std::vector<ProgramResult> results_{};
};

TEST_F(Reports, AnUncaughtExceptionIsOneLineAndACause) {
  run_job("throws");
  EXPECT_EQ(written(kOdd), kCause);
  EXPECT_EQ(results_[kOdd].err, "rank 1: no such file: numbers.csv\n");
  expect_echoes();
  for (int rank = 0; rank < kSize; ++rank) {
    EXPECT_EQ(results_[rank].exit_code, 128 + SIGABRT);
    EXPECT_EQ(own_lines(results_[rank].err).size(), 1u) << results_[rank].err;
  }
}

// A bug: between hosts every failure was an echo, so that nobody was the cause.
TEST_F(Reports, RanksThatSeeThatTheyDisagreeAreCauses) {
  run_job("differs", kTwoHosts);
  // One that comes late hears of it from the other, so its failure is an echo.
  int causes = 0;
  for (const int rank : {0, 1}) {
    const auto text = written(rank);
    causes += text.starts_with("cause: ");
    EXPECT_THAT(text, ContainsRegex("^(cause|echo): c10::DistBackendError: "
                                    "all_reduce #1 .*the ranks disagree"));
  }
  EXPECT_GE(causes, 1);
}

TEST_F(Reports, AnUncaughtExceptionOnGlooIsACauseToo) {
  run_job("throws", kGloo);
  EXPECT_EQ(written(kOdd), kCause);
  expect_echoes();
}

TEST_F(Reports, OfAProgramThatRecordsTheCauseHasItsMessage) {
  run_job("record");
  EXPECT_EQ(written(kOdd), kCause);
  EXPECT_EQ(results_[kOdd].err, "rank 1: no such file: numbers.csv\n");
  expect_echoes();
  for (const auto& result : results_) EXPECT_EQ(result.exit_code, 1);
}

// The program does not print the exception that it has caught.
TEST_F(Reports, OfAProgramThatCatchesOutsideTheGroupACauseIsKnown) {
  run_job("inside");
  EXPECT_THAT(written(kOdd),
              ContainsRegex("^cause: an exception left the scope"));
  expect_echoes();
  for (const auto& result : results_) EXPECT_EQ(result.exit_code, 1);
}

// Lockstep does not see the exception, so only the peers report, as echoes.
TEST_F(Reports, OfAProgramThatCatchesInsideTheGroupTheOthersAreEchoes) {
  run_job("outside");
  EXPECT_EQ(written(kOdd), "nothing");
  expect_echoes();
  for (const auto& result : results_) {
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(result.err, "");
  }
}

// As LauncherFaults.RankThatTheVictimsNameIsTheCause, with ranks that compute.
using UnderTheLauncher = FaultsTest;

TEST_F(UnderTheLauncher, RankThatCatchesWhatItThrewIsNamedFirst) {
  const auto result = run(
      {"--nproc-per-node=8", "--prefix-lines", "--failure-shutdown-timeout=60",
       LOCKSTEP_BIN_DIR "/tests/faults_departing", "outside", "lockstep",
       "odd=7"},
      {.environment = {"OMP_NUM_THREADS=1"}});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("run: rank 7 failed: exit code 1\n"));
  EXPECT_THAT(result.err,
              HasSubstr("\n  its last line: failed 7 no such file: numbers"));
}

using ForkedChildren = WaysTest;

TEST_P(ForkedChildren, LeaveTheirParentsGroupAlone) {
  auto& job = make_job(GetParam(), 2);
  job.program = "faults_departing";
  job.start("forks", {"odd=1"});
  job.await("done", -1, kSoon);
  EXPECT_THAT(job.all_said(1, "child"),
              ::testing::ElementsAre(
                  AllOf(HasSubstr("belongs to the process"),
                        HasSubstr("init_process_group() in the child")),
                  "is not initialized"));
  for (int rank = 0; rank < job.size(); ++rank) {
    const auto result = job.rank(rank).finish(kSoon);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, ForkedChildren,
                         ::testing::Values(kOneHost, kTwoHosts, kGloo),
                         way_name);

class AfterADeath : public WaysTest {};

// No rank waits for the dead one.
TEST_P(AfterADeath, TheOthersLeaveAtOnce) {
  for (const int victim : {1, 0}) {
    SCOPED_TRACE(victim);
    auto& job = make_job(GetParam(), 3);
    job.start("loop", {"leave=1", "end=1", "timeout=300000"});
    job.await("ready");
    job.rank(victim).signal(SIGKILL);
    job.await("failed", victim, kSoon);
    // Ranks would wait 5 s for each other if none had died.
    job.await("left", victim, seconds(3));
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      const auto result = job.rank(rank).finish(kSoon);
      // LibTorch prints these words when a wait in its store ends by timeout.
      // (LibTorch also prints that the store is gone, if a rank asks how
      // another one ended while the host of the store leaves.)
      EXPECT_THAT(result.err, Not(HasSubstr("timed out")));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, AfterADeath,
                         ::testing::Values(kOneHost, kGloo, kGlooDetail),
                         way_name);

using Meetings = FaultsTest;

TEST_F(Meetings, OfARankThatFailsInInitTheOthersHearWhy) {
  auto& job = make_job(kOneHost, 3);
  job.environment = [](int rank) {
    return rank == 0 ? std::vector<std::string>{"LOCKSTEP_TUNING=none"}
                     : std::vector<std::string>{};
  };
  job.start("first", {"timeout=300000", "end=1"});
  job.await("refused", -1, kSoon);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(job.said(rank, "refused"), HasSubstr("\"none\""));
  }
  EXPECT_THAT(job.said(2, "refused"), HasSubstr("rank 0"));
}

}  // namespace
}  // namespace lockstep::internal::testing
