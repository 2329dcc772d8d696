#include "lockstep/observe/metrics_logger.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <limits>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "tests/harness/in_child.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/observe/event_records.h"
#include "tests/observe/kept_warnings.h"

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace lockstep::internal::testing;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

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
TEST_F(MetricsLoggerTest, AFullDiskKeepsWhatIsThere) {
  EXPECT_EQ(in_child([&] {
              ::signal(SIGXFSZ, SIG_IGN);
              KeptWarnings warnings;
              MetricsLogger log(csv_);
              log.log({{"loss", 1}}, 1);
              log.flush();
              ::rlimit limit{.rlim_cur = 15, .rlim_max = RLIM_INFINITY};
              ::setrlimit(RLIMIT_FSIZE, &limit);
              log.log({{"loss", 1}, {"other", 2}}, 2);
              if (warnings.texts().size() != 1) return 1;
              if (warnings.texts()[0].find("a row with new names is lost") ==
                  std::string::npos) {
                return 2;
              }
              log.log({{"loss", 3}}, 3);
              if (message_of([&] { log.flush(); }).empty()) return 3;
              limit.rlim_cur = RLIM_INFINITY;
              ::setrlimit(RLIMIT_FSIZE, &limit);
              log.log({{"other", 4}}, 4);
              log.close();
              return 0;
            }),
            0);
  EXPECT_EQ(read_file(csv_), "step,loss,other\n1,1,\n3,3,\n4,,4\n");
  EXPECT_EQ(files_below(folder_.path()).size(), 1);
}

}  // namespace
}  // namespace lockstep::internal
