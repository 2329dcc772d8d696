#include "lockstep/observe/metrics_logger.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/in_child.h"
#include "tests/harness/kept_warnings.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/observe/event_records.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace lockstep::internal::testing;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string fs_name(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

class MetricsLoggerTest : public ::testing::Test {
 protected:
  TemporaryFolder folder_;
  const std::string csv_ = folder_.file("logs/metrics.csv");
  const std::string json_ = folder_.file("metrics.jsonl");
};

TEST_F(MetricsLoggerTest, CsvHasAColumnForEachName) {
  MetricsLogger log(csv_);
  log.log({{"loss", 0.1}, {"lr", 1e-3}}, 1);
  log.log({{"lr", 1e22}, {"loss", 1.0 / 3}}, 2);
  log.flush();
  EXPECT_EQ(read_file(csv_),
            "step,loss,lr\n"
            "1,0.1,0.001\n"
            "2,0.3333333333333333,1e+22\n");
  log.log({{"loss", kNaN}}, 3);
  log.log({{"loss", -kInfinity}, {"lr", kInfinity}}, 4);
  log.close();
  EXPECT_THAT(read_file(csv_), EndsWith("1e+22\n3,nan,\n4,-inf,inf\n"));
  EXPECT_THROW(log.log({{"loss", 1}}, 5), std::logic_error);
  EXPECT_THROW(log.log({{"other", 1}}, 5), std::logic_error);
}

// The file had the rows twice of steps that a resumed training made again.
TEST_F(MetricsLoggerTest, RowsAfterTheResumedStepAreTakenBack) {
  for (const std::string& path : {csv_, json_}) {
    SCOPED_TRACE(path);
    {
      MetricsLogger log(path);
      for (int64_t step = 1; step <= 5; ++step) {
        log.log({{"loss", 1.0 / static_cast<double>(step)}}, step);
        if (step == 3) log.log({{"val", 2}}, step);
      }
    }
    const std::string all = read_file(path);
    MetricsLogger log(path);
    log.resume(5);
    EXPECT_EQ(read_file(path), all);
    log.resume(3);
    const std::string rest = read_file(path);
    EXPECT_THAT(all, ::testing::StartsWith(rest));
    EXPECT_EQ(std::count(rest.begin(), rest.end(), '\n'), path == csv_ ? 5 : 4);
    log.log({{"loss", 0.25}}, 4);
    log.log({{"loss", 0.2}}, 5);
    // As an item of a snapshot: another run logs on, and is killed. Regression:
    // rows from before the snapshot were lost if they had not been written yet.
    const StateTree at_5 = log.state_dict();
    EXPECT_EQ(read_file(path), all);
    log.log({{"loss", 7}}, 6);
    log.close();
    EXPECT_THROW(log.resume(5), std::logic_error);
    MetricsLogger next(path);
    next.load_state_dict(at_5);
    EXPECT_EQ(read_file(path), all);
    EXPECT_EQ(next.state_dict(), at_5);
    EXPECT_THROW(next.load_state_dict(StateTree(5)), std::invalid_argument);
    // A snapshot from before the first row.
    MetricsLogger first(folder_.file("first" + fs_name(path)));
    const StateTree none = first.state_dict();
    first.log({{"loss", 1}}, 0);
    first.load_state_dict(none);
    first.log({{"loss", 2}}, 0);
    first.flush();
    const std::string text = read_file(first.path());
    EXPECT_THAT(text, HasSubstr("2"));
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), path == csv_ ? 2 : 1);
  }
}

// Its snapshots told the last step of the earlier run, and took back nothing.
TEST_F(MetricsLoggerTest, ARunThatBeginsAnewInAFileKnowsItsOwnLastStep) {
  for (const std::string& path : {csv_, json_}) {
    SCOPED_TRACE(path);
    MetricsLogger(path).log({{"loss", 3}}, 1000);
    MetricsLogger log(path);
    log.log({{"loss", 2}}, 2);
    log.log({{"val", 2}}, 1);
    log.flush();
    const StateTree at_2 = log.state_dict();
    log.log({{"loss", 1}}, 3);
    log.load_state_dict(at_2);
    const std::string left = read_file(path);
    EXPECT_EQ(std::count(left.begin(), left.end(), '\n'), path == csv_ ? 3 : 2);
    // A row of an earlier step does not change where the run is.
    log.log({{"val", 3}}, 1);
    EXPECT_EQ(log.state_dict(), at_2);
  }
}

TEST_F(MetricsLoggerTest, APipeIsRefused) {
  const std::string pipe = folder_.file("pipe.csv");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(message_of([&] { const MetricsLogger log(pipe); }),
              HasSubstr("is not a regular file"));
}

TEST_F(MetricsLoggerTest, CsvGetsColumnsForNewNames) {
  MetricsLogger log(csv_);
  log.log({{"loss", 1}}, 1);
  log.log({{"loss", 2}}, 2);
  log.log({{"val, \"x\"", 3}, {"more", 4}}, 2);
  log.log({{"loss", 5}, {"more", 6}}, 3);
  log.flush();
  EXPECT_EQ(read_file(csv_),
            "step,loss,\"val, \"\"x\"\"\",more\n"
            "1,1,,\n"
            "2,2,,\n"
            "2,,3,4\n"
            "3,5,,6\n");
  EXPECT_EQ(files_below(folder_.path()).size(), 1);  // nothing beside it
}

TEST_F(MetricsLoggerTest, CsvGoesOnAfterARestart) {
  { MetricsLogger(csv_).log({{"a,b", 1}, {"c", 2}}, 1); }
  write_file(csv_, read_file(csv_) + "2,3");  // a kill in the middle of a row
  {
    MetricsLogger log(csv_);
    log.log({{"c", 4}}, 2);
    log.log({{"d", 5}}, 3);
  }
  EXPECT_EQ(read_file(csv_), "step,\"a,b\",c,d\n1,1,2,\n2,,4,\n3,,,5\n");
  { MetricsLogger(csv_, {.overwrite = true}).log({{"e", 1}}, 1); }
  EXPECT_EQ(read_file(csv_), "step,e\n1,1\n");
}

TEST_F(MetricsLoggerTest, AnotherTableIsRefusedAndKept) {
  const std::string path = folder_.write("other.csv", "epoch,loss\n1,2\n");
  EXPECT_THAT(message_of([&] { MetricsLogger log(path); }),
              HasSubstr("begins with the column \"epoch\" and not with "
                        "\"step\""));
  EXPECT_EQ(read_file(path), "epoch,loss\n1,2\n");
  // Without an end of the last line, too.
  for (const std::string content : {"epoch,loss\n1,2", "epoch,loss"}) {
    write_file(path, content);
    EXPECT_THROW(MetricsLogger log(path), std::invalid_argument);
    EXPECT_EQ(read_file(path), content);
  }
}

TEST_F(MetricsLoggerTest, AHeaderThatWasCutShortIsWrittenAgain) {
  const std::string path = folder_.write("cut.csv", "step,lo");
  { MetricsLogger(path).log({{"loss", 1}}, 1); }
  EXPECT_EQ(read_file(path), "step,loss\n1,1\n");
}

// RFC 4180 ends lines with CR LF, as spreadsheets do.
TEST_F(MetricsLoggerTest, AFileWithCrLfGoesOnWithCrLf) {
  const std::string path = folder_.write("crlf.csv", "step,a,b\r\n1,2,3\r\n");
  {
    MetricsLogger log(path);
    log.log({{"b", 5}, {"a", 4}}, 2);
    log.flush();
    EXPECT_EQ(read_file(path), "step,a,b\r\n1,2,3\r\n2,4,5\r\n");
    log.log({{"c", 6}}, 3);
  }
  EXPECT_EQ(read_file(path), "step,a,b,c\r\n1,2,3,\r\n2,4,5,\r\n3,,,6\r\n");
}

// Two kinds of line ends become that of the header when the file is rewritten.
TEST_F(MetricsLoggerTest, ARewrittenFileHasOneKindOfLineEnds) {
  const std::string path = folder_.write("both.csv", "step,a\n1,2\r\n2,3\n");
  { MetricsLogger(path).log({{"b", 4}}, 3); }
  EXPECT_EQ(read_file(path), "step,a,b\n1,2,\n2,3,\n3,,4\n");
}

TEST_F(MetricsLoggerTest, JsonLinesHasAnObjectInEachLine) {
  {
    MetricsLogger log(json_);
    log.log({{"loss", 0.1}, {"a \"ü\"", -2}}, 1);
  }
  write_file(json_, read_file(json_) + "{\"step\": 2, \"lo");
  {
    MetricsLogger log(json_);
    log.log({{"loss", kNaN}, {"x", kInfinity}, {"y", 1e-300}}, 2);
    log.log({}, 3);
  }
  EXPECT_EQ(read_file(json_),
            "{\"step\": 1, \"loss\": 0.1, \"a \\\"ü\\\"\": -2}\n"
            "{\"step\": 2, \"loss\": null, \"x\": null, \"y\": 1e-300}\n"
            "{\"step\": 3}\n");
}

TEST_F(MetricsLoggerTest, EachMistakeIsOneLine) {
  MetricsLogger log(json_);
  const auto mistake = [](auto call) {
    const std::string message = message_of(call);
    EXPECT_THAT(message, Not(HasSubstr("\n")));
    return message;
  };
  EXPECT_THAT(mistake([&] { MetricsLogger never("metrics.txt"); }),
              HasSubstr("ends with .csv or .jsonl"));
  EXPECT_THAT(mistake([&] {
                MetricsLogger never(csv_,
                                    {.flush_secs = std::chrono::seconds(0)});
              }),
              HasSubstr("flush_secs is 0 s; give 1 or more"));
  EXPECT_THAT(mistake([&] { log.log({{"a", 1}, {"b", 2}, {"a", 3}}, 1); }),
              HasSubstr("was given \"a\" twice"));
  EXPECT_THAT(mistake([&] { log.log({{"step", 1}}, 1); }),
              HasSubstr("give the metric another name"));
  EXPECT_THAT(mistake([&] { log.log({{"", 1}}, 1); }),
              HasSubstr("the name of a metric is empty"));
  EXPECT_THAT(mistake([&] { log.log({{"a\nb", 1}}, 1); }),
              HasSubstr("control character"));
  log.close();
  EXPECT_EQ(read_file(json_), "");
}

WORLD_TEST(MetricsLogger, OnlyRankZeroWritesUnlessAsked, 2) {
  const std::string folder = world.folder / "metrics";
  auto group = init_process_group("gloo");
  MetricsLogger one(folder + "/one.csv");
  MetricsLogger each(folder + "/each.jsonl", {.every_rank = true});
  EXPECT_EQ(one.writes(), world.rank == 0);
  one.log({{"loss", 1}}, 1);
  each.log({{"loss", 1}}, 1);
  EXPECT_THROW(one.log({{"", 1}}, 1), std::invalid_argument);
  one.close();
  each.close();
  barrier();
  EXPECT_THAT(files_below(folder),
              ElementsAre("one.csv", "rank_0/each.jsonl", "rank_1/each.jsonl"));
  EXPECT_EQ(read_file(folder + "/one.csv"), "step,loss\n1,1\n");
}

TEST_F(MetricsLoggerTest, FlushedRowsSurviveSigkill) {
  in_child([&] {
    MetricsLogger log(csv_, {.flush_secs = std::chrono::hours(1)});
    log.log({{"loss", 1}}, 1);
    log.flush();
    log.log({{"loss", 2}}, 2);
    ::raise(SIGKILL);
    return 0;
  });
  EXPECT_EQ(read_file(csv_), "step,loss\n1,1\n");
}

// A limit on the size of files is a disk that is full at any byte.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    ::signal(SIGXFSZ, SIG_IGN);
    set(bytes);
  }
  void make_room() { set(RLIM_INFINITY); }

 private:
  static void set(rlim_t bytes) {
    const ::rlimit limit{.rlim_cur = bytes, .rlim_max = RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
};

TEST_F(MetricsLoggerTest, RowsOfADiskThatIsFullFromTheFirstWait) {
  EXPECT_EQ(in_child([&] {
              KeptWarnings warnings;
              MetricsLogger log(csv_);
              FullDisk disk(4);
              for (int step = 0; step < 2000; ++step) {
                log.log({{"loss", step}}, step);
              }
              if (message_of([&] { log.flush(); }).empty()) return 1;
              for (int step = 2000; step < 4000; ++step) {
                log.log({{"loss", step}}, step);
              }
              if (warnings.texts().size() > 1) return 2;
              if (!read_file(csv_).empty()) return 3;
              disk.make_room();
              log.flush();
              return warnings.texts().size() > 1 ? 4 : 0;
            }),
            0);
  std::string expected = "step,loss\n";
  for (int step = 0; step < 4000; ++step) {
    const std::string text = std::to_string(step);
    expected.append(text).append(",").append(text).append("\n");
  }
  EXPECT_EQ(read_file(csv_), expected);
}

TEST_F(MetricsLoggerTest, RowsWithNewNamesWaitForRoom) {
  EXPECT_EQ(in_child([&] {
              KeptWarnings warnings;
              MetricsLogger log(csv_);
              log.log({{"loss", 1}}, 1);
              log.flush();
              FullDisk disk(15);
              log.log({{"loss", 1}, {"other", 2}}, 2);
              if (warnings.texts().size() != 1) return 1;
              if (warnings.texts()[0].find(
                      "cannot be rewritten with new columns (File too large); "
                      "training goes on") == std::string::npos) {
                return 2;
              }
              log.log({{"loss", 3}}, 3);
              log.log({{"third", 4}}, 4);
              if (message_of([&] { log.flush(); }).empty()) return 3;
              log.log({{"loss", 5}}, 5);
              if (read_file(csv_) != "step,loss\n1,1\n") return 4;
              if (files_below(folder_.path()).size() != 1) return 5;
              disk.make_room();
              log.close();
              return warnings.texts().size() != 1 ? 6 : 0;
            }),
            0);
  EXPECT_EQ(read_file(csv_),
            "step,loss,other,third\n1,1,,\n2,1,2,\n3,3,,\n4,,,4\n5,5,,\n");
  EXPECT_EQ(files_below(folder_.path()).size(), 1);
}

// log() itself tries again, and a second full disk is a second warning.
TEST_F(MetricsLoggerTest, ALaterRowBringsTheRowsThatWaited) {
  EXPECT_EQ(in_child([&] {
              KeptWarnings warnings;
              MetricsLogger log(csv_);
              log.log({{"a", 1}}, 1);
              log.flush();
              for (const std::string name : {"b", "c"}) {
                FullDisk disk(1);
                log.log({{name, 2}}, 2);
                disk.make_room();
                const auto deadline =
                    std::chrono::steady_clock::now() + std::chrono::minutes(1);
                while (read_file(csv_).find(name) == std::string::npos) {
                  if (std::chrono::steady_clock::now() > deadline) return 1;
                  log.log({}, 3);
                  std::this_thread::sleep_for(std::chrono::milliseconds(20));
                }
              }
              return warnings.texts().size() != 2 ? 2 : 0;
            }),
            0);
}

TEST_F(MetricsLoggerTest, CloseTellsWhenRowsWithNewNamesAreLost) {
  EXPECT_EQ(in_child([&] {
              KeptWarnings warnings;
              MetricsLogger log(csv_);
              log.log({{"loss", 1}}, 1);
              log.flush();
              FullDisk disk(15);
              log.log({{"other", 2}}, 2);
              if (message_of([&] { log.close(); }).empty()) return 1;
              log.close();  // does nothing
              log.flush();
              return warnings.texts().size() != 1 ? 2 : 0;
            }),
            0);
  EXPECT_EQ(read_file(csv_), "step,loss\n1,1\n");
}

// A row of 4,000 cells that are empty has 4,002 bytes.
TEST_F(MetricsLoggerTest, RowsThatWaitHaveABound) {
  EXPECT_EQ(in_child([&] {
              KeptWarnings warnings;
              std::vector<std::pair<std::string, double>> wide;
              for (int name = 0; name < 4000; ++name) {
                wide.emplace_back(std::to_string(name), 1);
              }
              MetricsLogger log(csv_, {.flush_secs = std::chrono::hours(1)});
              log.log({{"loss", 1}}, 1);
              log.flush();
              FullDisk disk(15);
              log.log(wide, 1);
              for (int row = 0; row < 17000; ++row) log.log({}, 2);
              if (warnings.texts().size() != 1) return 1;
              disk.make_room();
              log.flush();
              if (warnings.texts().size() != 2) return 2;
              if (warnings.texts()[1].find("rows were dropped while") ==
                  std::string::npos) {
                return 3;
              }
              const auto size = std::filesystem::file_size(csv_);
              return size < (63 << 20) || size > (65 << 20) ? 4 : 0;
            }),
            0);
}

}  // namespace
}  // namespace lockstep::internal
