// `lockstep report scaling` with real trainings and with programs that are
// none.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "tests/cli/xml_element.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kRanks = LOCKSTEP_BIN_DIR "/tests/inspect_ranks";
constexpr auto kLongTime = std::chrono::seconds(90);

class ScalingReport : public LauncherTest {
 protected:
  std::unique_ptr<RunningProgram> start_report(
      std::vector<std::string> arguments) {
    std::vector<std::string> all{LOCKSTEP_BIN_DIR "/lockstep", "report",
                                 "scaling"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return start_program(all);
  }
  ProgramResult report(std::vector<std::string> arguments) {
    return start_report(std::move(arguments))->finish(kLongTime);
  }
  // A script that prints what a program would, and runs as often as asked.
  std::string script(const std::string& text) {
    const fs::path path = scratch() / "program";
    std::ofstream(path) << "#!/bin/sh\n" << text << "\n";
    fs::permissions(path, fs::perms::owner_all);
    return path;
  }
};

TEST_F(ScalingReport, MeasuresATrainingWithRanksAndThreads) {
  const std::string log = scratch() / "metrics.csv";
  const std::string page = scratch() / "scaling.html";
  const auto result =
      report({"--nproc=2,1", "--rounds=2", "--json", "--target=loss<=0.1",
              "--html", page, "--", kRanks, "finite", "{batch:4}", log});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const json document = json::parse(result.out);
  EXPECT_EQ(document["format"], 1);
  EXPECT_EQ(document["rounds"], 2);
  ASSERT_EQ(document["tables"].size(), 2u);
  EXPECT_EQ(document["tables"][0]["scaling"], "weak");
  EXPECT_EQ(document["tables"][1]["scaling"], "strong");
  const std::string batches[2][3] = {{"4", "4", "8"}, {"4", "2", "4"}};
  const std::string sides[] = {"ranks", "ranks", "threads"};
  for (int table = 0; table < 2; ++table) {
    const json& rows = document["tables"][table]["rows"];
    ASSERT_EQ(rows.size(), 3u);
    const double one = rows[0]["samples_per_s"]["median"];
    for (int i = 0; i < 3; ++i) {
      const json& row = rows[i];
      const int nproc = i == 0 ? 1 : 2;
      EXPECT_EQ(row["side"], sides[i]);
      EXPECT_EQ(row["nproc"], nproc);
      EXPECT_EQ(row["command"],
                (json{kRanks, "finite", batches[table][i], log}));
      const double rate = row["samples_per_s"]["median"];
      // A batch takes 5 ms at least.
      const int processes = i == 1 ? 2 : 1;
      EXPECT_GT(rate, 0);
      EXPECT_LE(rate, processes * std::stoi(batches[table][i]) / 0.005);
      EXPECT_DOUBLE_EQ(row["speed_up"], rate / one);
      EXPECT_DOUBLE_EQ(row["efficiency"], rate / one / nproc);
      // The loss falls below it in the tenth of 20 batches.
      EXPECT_GE(row["target_s"], 9 * 0.005);
      EXPECT_LT(row["target_s"], row["seconds"]);
    }
  }
  // The rows take turns.
  std::vector<std::string> order;
  for (const auto& line : lines(result.err)) {
    const std::regex said("round (.) of 2, (.*) \\((.*)\\): .*");
    std::smatch match;
    if (std::regex_search(line, match, said)) {
      order.push_back(match[1].str() + " " + match[2].str() + " " +
                      match[3].str());
    }
  }
  ASSERT_EQ(order.size(), 10u) << result.err;
  EXPECT_EQ(order[0], "1 1 rank weak");
  EXPECT_EQ(order[4], "1 1 process, 2 threads strong");
  EXPECT_EQ(order[5], "2 1 rank weak");

  EXPECT_THAT(result.out, HasSubstr("2 ranks train "));
  const std::string html = read_file(page);
  EXPECT_THAT(html, AllOf(HasSubstr("<p>2 ranks train "),
                          HasSubstr(" times as fast as one ("),
                          HasSubstr("; Lockstep "), HasSubstr("LibTorch 2."),
                          ContainsRegex("20..-..-..T..:..:..")))
      << "the result, the date and the versions";
  EXPECT_THAT(html, AllOf(HasSubstr("prefers-color-scheme: dark"),
                          HasSubstr("width=device-width, initial-scale=1"),
                          HasSubstr("<div class=\"wide\"><svg")))
      << "for dark and for narrow screens";
  EXPECT_THAT(html,
              AllOf(HasSubstr("<!DOCTYPE html>"), HasSubstr("Weak scaling"),
                    HasSubstr("loss&lt;=0.1"), Not(HasSubstr("src=")),
                    Not(HasSubstr("href=")), Not(HasSubstr("url("))))
      << "The page must need nothing else.";
  int pictures = 0;
  for (size_t at = 0; (at = html.find("<svg", at)) != std::string::npos; ++at) {
    const auto end = html.find("</svg>", at) + 6;
    const auto svg = parse_xml(html.substr(at, end - at));
    std::vector<std::string> curves;
    for (const auto* line : svg.all("polyline")) {
      curves.push_back(line->attributes.at("id"));
    }
    const std::string scaling = pictures == 0 ? "weak" : "strong";
    EXPECT_THAT(curves, ElementsAre(scaling + "-ideal", scaling + "-ranks",
                                    scaling + "-threads"));
    // The ideal line looks different from the measured one.
    int dots = 0;
    for (const auto* line : svg.all("polyline")) {
      const bool is_ideal = line->attributes.at("id") == scaling + "-ideal";
      EXPECT_EQ(line->attributes.contains("stroke-dasharray"), is_ideal);
    }
    for (const auto* dot : svg.all("circle")) {
      ++dots;
      EXPECT_NE(dot->attributes.at("fill"), "#999999");
    }
    EXPECT_GT(dots, 0);
    ++pictures;
  }
  EXPECT_EQ(pictures, 2);
}

TEST_F(ScalingReport, EachRankLeavesASummary) {
  const std::string log = scratch() / "metrics.csv";
  const auto trained =
      run({"--nproc-per-node=2", kRanks, "finite", "4", log},
          {.environment = {"LOCKSTEP_TRAINING_SUMMARY=" + scratch().string(),
                           "LOCKSTEP_TRAINING_TARGET=loss<=0.04"}});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  for (int rank = 0; rank < 2; ++rank) {
    const fs::path file =
        scratch() / ("rank-" + std::to_string(rank) + ".json");
    const json summary = json::parse(read_file(file));
    EXPECT_EQ(summary["samples"], 20 * 4);
    EXPECT_GT(summary["samples_per_s"], 0);
    // The loss ends at 1/20, and rank 0 alone logs it.
    EXPECT_EQ(summary["metrics"],
              rank == 0 ? (json{{"loss", 0.05}}) : json::object());
    EXPECT_TRUE(summary["target_s"].is_null());
  }
}

TEST_F(ScalingReport, SaysWhatToChangeIfThreadsAreFaster) {
  const auto report_of = [&](const std::string& ranks_rate) {
    return report(
        {"--nproc=1,2", "--rounds=1", "--",
         script("[ $RANK = 0 ] && echo $(($OMP_NUM_THREADS == 2 ? 150 : "
                "$WORLD_SIZE == 2 ? " +
                ranks_rate + " : 100)) samples/s; exit 0")});
  };
  const auto slower = report_of("140");
  ASSERT_EQ(slower.exit_code, 0) << slower.err;
  EXPECT_THAT(slower.out,
              HasSubstr("threads. Threads are faster here. Change the line of "
                        "the optimizer first: from torch::optim"));
  EXPECT_THAT(report_of("160").out, Not(HasSubstr("Threads are faster")));
}

TEST_F(ScalingReport, ReadsWhatOtherProgramsPrint) {
  const auto result = report(
      {"--nproc=1,2", "--rounds=1", "--rate-pattern", "rate=([0-9]+)",
       "--compare", "echo rate=1; echo rate={nproc}00", "--",
       script(
           "[ $RANK = 0 ] && echo rate=$((WORLD_SIZE * 300)), $OMP_NUM_THREADS "
           "thread; exit 0")});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("\n                      samples/s"));
  std::vector<std::string> rows;
  for (const auto& line : lines(result.out)) {
    if (line.find('%') == std::string::npos) continue;
    rows.push_back(std::regex_replace(line, std::regex("  +"), "|"));
  }
  EXPECT_THAT(rows,
              ElementsAre("2 ranks train 2.00 times as fast as one (100 % of "
                          "ideal), 2.00 times as fast as one process with 2 "
                          "threads, and 3.00 times as fast as the compared "
                          "command.",
                          "1 rank|300|300|300|1.00|100 %|3.33",
                          "2 ranks|600|600|600|2.00|100 %|3.33",
                          "1 process, 2 threads|300|300|300|1.00|50 %|6.67",
                          "compared, 1|100|100|100|0.33|33 %|10.0",
                          "compared, 2|200|200|200|0.67|33 %|10.0"));
}

TEST_F(ScalingReport, ThreadsAreGivenToOneProcess) {
  const std::string seen = scratch() / "seen";
  const auto result = report({"--nproc=3", "--rounds=1", "--",
                              script("echo $WORLD_SIZE $OMP_NUM_THREADS >> " +
                                     seen + "; echo 5 samples/s")});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(lines(read_file(seen)),
              ElementsAre("1 1", "3 1", "3 1", "3 1", "1 3"));
}

TEST_F(ScalingReport, AFailedRunEndsTheReportWithItsOutput) {
  const auto result =
      report({"--nproc=2", "--", script("echo too bad; exit 3")});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(
      result.err,
      AllOf(HasSubstr("lockstep report scaling: 1 rank (weak) ended with "
                      "exit code 3; the end of its output:"),
            HasSubstr("\n  too bad\n")));
}

TEST_F(ScalingReport, AProgramThatSaysNothingIsNamed) {
  const auto result = report({"--nproc=1", "--", script("echo hello")});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("1 rank (weak) said nothing about samples"),
                    HasSubstr("--rate-pattern"), HasSubstr("\n  hello\n")));
}

TEST_F(ScalingReport, AnUnknownMetricIsRefusedAfterTheFirstRun) {
  const std::string log = scratch() / "metrics.csv";
  const auto result = report({"--nproc=1", "--target=accuracy>=0.9", "--",
                              kRanks, "finite", "4", log});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err,
              HasSubstr("--target=accuracy>=0.9: the program logs no metric "
                        "\"accuracy\"; it logs loss\n"));
}

// "1e+06 samples/s", as a stream of C++ prints a million, was read as 6.
TEST_F(ScalingReport, ARateIsReadWholeOrNotAtAll) {
  const auto read = report(
      {"--nproc=1", "--rounds=1", "--", script("echo at 1e+06 samples/s")});
  EXPECT_EQ(read.exit_code, 0) << read.err;
  EXPECT_THAT(read.err, HasSubstr(": 1000000.0 samples/s"));
  for (const std::string rate : {"1,234.5", "-5", "v1.5"}) {
    const auto refused = report({"--nproc=1", "--rounds=1", "--",
                                 script("echo " + rate + " samples/s")});
    EXPECT_EQ(refused.exit_code, 1) << rate << refused.err;
  }
}

TEST_F(ScalingReport, WrongArgumentsAreRefusedBeforeARun) {
  const std::string program =
      script("echo 5 samples/s; touch " + (scratch() / "was_run").string());
  const auto refused = [&](std::vector<std::string> arguments, int exit_code) {
    const auto result = report(std::move(arguments));
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    EXPECT_EQ(lines(result.err).size(), 1u) << result.err;
    EXPECT_FALSE(fs::exists(scratch() / "was_run"));
    return result.err;
  };
  EXPECT_THAT(refused({"--nproc=0", program}, 2), HasSubstr("--nproc"));
  EXPECT_THAT(refused({"--nproc=2,x", program}, 2), HasSubstr("\"x\""));
  EXPECT_THAT(refused({"--rounds=0", program}, 2), HasSubstr("--rounds"));
  EXPECT_THAT(refused({"--timeout=no", program}, 2), HasSubstr("--timeout"));
  EXPECT_THAT(refused({"--target=loss", program}, 2), HasSubstr("loss<=0.3"));
  EXPECT_THAT(refused({"--rate-pattern=([0-9]", program}, 2),
              HasSubstr("--rate-pattern"));
  EXPECT_THAT(refused({"--rate-pattern=x", program}, 2), HasSubstr("group"));
  EXPECT_THAT(refused({"--nproc=3", program, "{batch:4}"}, 2),
              HasSubstr("{batch:4}"));
  EXPECT_THAT(refused({"--html=/nowhere/page", program}, 2),
              HasSubstr("/nowhere/page"));
  EXPECT_THAT(refused({"./no-such-program"}, 127),
              HasSubstr("no-such-program"));
  EXPECT_THAT(refused({}, 2), HasSubstr("the program is missing"));
}

TEST_F(ScalingReport, ARunThatDoesNotEndIsEnded) {
  const auto result = report(
      {"--nproc=2", "--timeout=1", "--", script("echo begun; exec sleep 60")});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, AllOf(HasSubstr("did not end within 1 s"),
                                HasSubstr("\n  begun\n")));
  EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
}

// A shell ended before the program that it had started, which then ran beside
// the next rows.
TEST_F(ScalingReport, WhatAComparedCommandLeavesIsEnded) {
  const auto result =
      report({"--nproc=1", "--rounds=2", "--compare",
              "sh -c 'trap : TERM; sleep 60; :' & echo 5 samples/s", "--",
              script("echo 5 samples/s")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
}

// A loss that became NaN was taken for one that is not logged.
TEST_F(ScalingReport, ATargetThatIsNeverMetIsSaid) {
  const std::string log = scratch() / "metrics.csv";
  const auto result = report({"--nproc=1", "--rounds=1", "--target=loss<=0.1",
                              "--", kRanks, "finite", "4", log, "nan"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("not met"));
}

TEST_F(ScalingReport, AnIgnoredSigchldAndAMissingTmpdirAreNoMatter) {
  const auto result =
      run_program({"/bin/sh", "-c",
                   "trap '' CHLD; TMPDIR=/missing exec " LOCKSTEP_BIN_DIR
                   "/lockstep report scaling --nproc=1 --rounds=1 -- " +
                       script("echo 5 samples/s")});
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST_F(ScalingReport, ASignalEndsIt) {
  const std::string begun = scratch() / "begun";
  const auto running = start_report(
      {"--nproc=2", "--", script("echo x > " + begun + "; exec sleep 60")});
  for (int i = 0; i < 2000 && !fs::exists(begun); ++i) usleep(10'000);
  ASSERT_TRUE(fs::exists(begun));
  running->signal(SIGINT);
  EXPECT_EQ(running->finish().exit_code, 128 + SIGINT);
  EXPECT_TRUE(await_no_process(std::chrono::seconds(60)));
}

}  // namespace
}  // namespace lockstep::internal::testing
