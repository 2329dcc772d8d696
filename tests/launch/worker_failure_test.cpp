// Which of several failed workers is named first, and what their error files
// contain.
#include "lockstep/launch/watch/worker_failure.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <fstream>

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::system_clock;

system_clock::time_point at(double seconds) {
  return system_clock::time_point(
      milliseconds(static_cast<int64_t>(seconds * 1000)));
}

WorkerFailure failed(int rank, double ended) {
  WorkerFailure failure;
  failure.rank = rank;
  failure.exit_code = 1;
  failure.ended = at(ended);
  return failure;
}

WorkerFailure threw(int rank, double ended, FailureKind kind, double time) {
  WorkerFailure failure = failed(rank, ended);
  failure.error = {kind, "error of " + std::to_string(rank), at(time)};
  return failure;
}

std::vector<int> order(std::vector<WorkerFailure> failures) {
  std::ranges::sort(failures, comes_before);
  std::vector<int> ranks;
  for (const auto& one : failures) ranks.push_back(one.rank);
  return ranks;
}

TEST(WorkerFailure, CausesComeFirstAndEchoesLast) {
  EXPECT_EQ(order({threw(0, 10, FailureKind::echo, 9), failed(1, 12),
                   threw(2, 14, FailureKind::cause, 13)}),
            (std::vector<int>{2, 1, 0}));
}

TEST(WorkerFailure, EarlierErrorComesFirstWhoeverEndsFirst) {
  EXPECT_EQ(order({threw(0, 10, FailureKind::unknown, 9.5),
                   threw(1, 11, FailureKind::unknown, 9.2), failed(2, 9.4)}),
            (std::vector<int>{1, 2, 0}));
}

TEST(WorkerFailure, OfOneMomentTheKilledThenTheLowestRank) {
  auto killed = failed(3, 10);
  killed.signal = 9;
  EXPECT_EQ(order({failed(2, 10), failed(1, 10), killed}),
            (std::vector<int>{3, 1, 2}));
}

// The words of the victims decide, however the rank ended that they name.
TEST(WorkerFailure, RankThatOthersNameComesFirst) {
  WorkerFailure named = threw(7, 20, FailureKind::cause, 20);
  named.error.message.clear();
  named.exit_code = 143;
  named.signal = 15;
  named.was_stopped = true;
  named.named_by = "rank 0: all_reduce #5 failed: rank 7 has left the group";
  named.logs = {{.file = "stderr.log", .lines = {"a", "no such file: x.csv"}}};
  EXPECT_EQ(order({threw(0, 10, FailureKind::echo, 9),
                   threw(2, 9, FailureKind::cause, 8), failed(1, 8), named}),
            (std::vector<int>{7, 2, 1, 0}));
  const std::string text = describe({named, failed(1, 8)}, 0, 0);
  EXPECT_THAT(text,
              ::testing::StartsWith("rank 7 left while others needed it: the "
                                    "launcher stopped it while it was ending"));
  EXPECT_THAT(text,
              ::testing::HasSubstr("\n  its last line: no such file: x.csv\n  "
                                   "rank 0: all_reduce #5 failed: rank 7"));
  named.logs.clear();
  named.last_line = "no such\x1b[2J";
  EXPECT_THAT(summary({.all = {&named}}),
              ::testing::EndsWith(": its last line: no such [2J"));
  named.exit_code = 0;
  named.signal.reset();
  EXPECT_EQ(headline(named), "rank 7 left while others needed it: exit code 0");
}

TEST(WorkerFailure, EchoesNameRanks) {
  EXPECT_EQ(ranks_named_in("all_reduce #5 of rank 3 failed after 9 ms: rank 7 "
                           "has left the group, rank 12 died"),
            (std::set<int>{7, 12}));
  EXPECT_EQ(ranks_named_in("rank 1 failed: rank 2 left because of an error"),
            (std::set<int>{1, 2}));
  EXPECT_EQ(ranks_named_in("rank 4 did not come; rank  died; rank x died"),
            std::set<int>());
  EXPECT_EQ(ranks_named_in("rank 99999999999999 died"), std::set<int>());
  EXPECT_EQ(ranks_named_in("ranks 1, 3 and 5-7 died; ranks 8 and 9 came"),
            (std::set<int>{1, 3, 5, 6, 7}));
  EXPECT_EQ(ranks_named_in("ranks 0-2000000000 died"), std::set<int>());
}

class ErrorFile : public ::testing::Test {
 protected:
  ErrorFile() {
    std::string name = (fs::temp_directory_path() / "error_XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  ~ErrorFile() override { fs::remove_all(folder_); }

  ErrorRecord read(const std::string& text) {
    std::ofstream(folder_ / "error.json") << text;
    return read_error_file(folder_ / "error.json");
  }

  fs::path folder_;
};

TEST_F(ErrorFile, OfTheLibraryHasATimeAndAKind) {
  ::setenv("TORCHELASTIC_ERROR_FILE", (folder_ / "error.json").c_str(), 1);
  for (const auto& [noted, kind] :
       {std::pair(FailureKind::echo, FailureKind::echo),
        std::pair(FailureKind::cause_without_words, FailureKind::cause),
        std::pair(FailureKind::cause, FailureKind::cause)}) {
    const auto before = system_clock::now();
    note_failure(noted, "no \"file\"");
    const auto record = read_error_file(folder_ / "error.json");
    EXPECT_EQ(record.message, "no \"file\"");
    EXPECT_EQ(record.kind, kind);
    EXPECT_GE(record.time, before);
    EXPECT_LE(record.time, system_clock::now());
    if (noted != FailureKind::cause_without_words) forget_failure();
  }
  forget_failure();
  ::unsetenv("TORCHELASTIC_ERROR_FILE");
  EXPECT_EQ(read_error_file(folder_ / "error.json").message, "");
}

// Python rounds down: the error may be later than the file's time, but not
// later than the rank's end.
TEST_F(ErrorFile, OfPythonHasWholeSeconds) {
  WorkerFailure failure = failed(0, 1700000000.5);
  failure.error = read(
      R"({"message": {"message": "ValueError", "extraInfo":
          {"py_callstack": "...", "timestamp": "1700000000"}}})");
  EXPECT_EQ(failure.error.kind, FailureKind::unknown);
  EXPECT_EQ(failure.time(), failure.ended);
  failure.ended = at(1700000009);
  EXPECT_EQ(failure.time(), at(1700000001));
}

TEST_F(ErrorFile, OddOnesAreNoMatter) {
  EXPECT_EQ(read(R"({"message": "plain"})").message, "plain");
  for (const char* text :
       {"", "{\"message\": {\"mess", "[]", "{}", R"({"message": 5})",
        R"({"message": {"extraInfo": 5}})",
        R"({"message": {"extraInfo": {"timestamp": 5, "kind": 5}}})",
        R"({"message": {"extraInfo": {"timestamp": "x", "kind": "other"}}})",
        R"({"message": {"extraInfo": {"timestamp": "-1"}}})",
        R"({"message": {"extraInfo": {"time_ns": "9e99"}}})",
        R"({"message": {"extraInfo": {"timestamp": "1e9", "time_ns": 7}}})",
        R"({"message": {"extraInfo": {"timestamp": "9300000000"}}})",
        R"({"message": {"extraInfo": {"timestamp": "999999999999"}}})"}) {
    const auto record = read(text);
    EXPECT_EQ(record.message, "") << text;
    EXPECT_EQ(record.kind, FailureKind::unknown) << text;
    EXPECT_FALSE(record.time) << text;
  }
}

// N ranks that failed of one cause said the same N times.
TEST(WorkerFailure, EachTextIsToldOnceWithItsRanks) {
  std::vector<WorkerFailure> failures{threw(5, 10, FailureKind::cause, 9)};
  failures[0].error.message = "std::runtime_error: first\nsecond";
  failures[0].exit_code = 134;
  failures[0].signal = SIGABRT;
  for (int rank : {0, 1, 2, 3, 7}) {
    failures.push_back(threw(rank, 11, FailureKind::echo, 10));
    const auto number = std::to_string(rank);
    failures.back().error.message =
        "all_reduce #7 on rank " + number + " failed after " + number +
        "1 ms: rank 1: 4; ranks 0, 2 and 3: 5; flight record: /tmp/rank" +
        number + ".json";
  }
  failures.push_back(failed(4, 12));
  failures.push_back(failed(6, 12));
  const std::string text = describe(failures, 0, 3);
  EXPECT_THAT(text, ::testing::StartsWith(
                        "rank 5 failed: std::runtime_error: first\n  local"));
  EXPECT_THAT(text,
              ::testing::EndsWith(
                  "\n  killed by SIGABRT (exit code 134)\n  second"
                  "\n  then ranks 0-3 and 7 failed: all_reduce #7 on rank "
                  "0 failed after 01 ms: rank 1: 4; ranks 0, 2 and 3: 5; "
                  "flight record: /tmp/rank0.json"
                  "\n  then ranks 4 and 6 failed: exit code 1"));
  failures.erase(failures.begin());
  EXPECT_THAT(
      describe(failures, 0, 3),
      ::testing::EndsWith("\n  exit code 1"
                          "\n  then ranks 1-3 and 7 failed alike"
                          "\n  then ranks 4 and 6 failed: exit code 1"));
}

TEST(WorkerFailure, EveryFailedRankIsListed) {
  std::vector<WorkerFailure> failures{failed(5, 10)};
  for (int rank = 10; rank < 30; ++rank) {
    failures.push_back(threw(rank, 11, FailureKind::cause, 11));
    failures.back().error.message = std::string(rank, 'x') + "\ntrace";
  }
  const std::string text = describe(failures, 0, 3);
  EXPECT_THAT(text, ::testing::StartsWith("rank 5 failed: exit code 1\n"));
  EXPECT_THAT(text,
              ::testing::HasSubstr("\n  then rank 10 failed: xxxxxxxxxx\n"));
  EXPECT_THAT(text, ::testing::EndsWith("\n  then ranks 26-29 failed"));
}

// A signal from outside says more than an error that was caught before.
TEST(WorkerFailure, AKilledRankIsNotSaidToHaveThrown) {
  WorkerFailure killed = threw(1, 10, FailureKind::cause, 9);
  killed.error.message = "all_reduce #7 failed";
  killed.exit_code = 137;
  killed.signal = SIGKILL;
  EXPECT_EQ(headline(killed),
            "rank 1 failed: killed by SIGKILL (exit code 137)");
  EXPECT_EQ(details(killed), "all_reduce #7 failed");
  killed.exit_code = 134;
  killed.signal = SIGABRT;
  EXPECT_EQ(headline(killed), "rank 1 failed: all_reduce #7 failed");
  killed.error.message = "SIGABRT";
  EXPECT_EQ(headline(killed),
            "rank 1 failed: killed by SIGABRT (exit code 134)");
}

}  // namespace
}  // namespace lockstep::internal::testing
