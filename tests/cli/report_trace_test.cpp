// `lockstep report trace` on traces written for the test, whose right answer
// was worked out by hand, and its errors for files that are not traces.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int64_t kBase = 1'700'000'000'000'000'000;

// Returns an event from `begin` to `end`, in microseconds, of the thread 1.
json event(const std::string& name, const std::string& category, double begin,
           double end, int thread = 1) {
  return {{"ph", "X"},     {"cat", category}, {"name", name},      {"pid", 70},
          {"tid", thread}, {"ts", begin},     {"dur", end - begin}};
}

// Returns a step of 100 us in which the rank computes for `compute` us, and
// waits until all_reduce ends at 70 us.
json step_events(int number, double begin, double compute) {
  json add = event("aten::add", "cpu_op", begin + 42, begin + 52);
  json events{
      event("ProfilerStep#" + std::to_string(number), "user_annotation", begin,
            begin + 100),
      event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
            "user_annotation", begin, begin + 10),
      event("aten::mm", "cpu_op", begin + 10, begin + 10 + compute),
      event("c10d::allreduce_", "cpu_op", begin + 10 + compute,
            begin + 12 + compute),
      event("gloo:all_reduce", "user_annotation", begin + 11 + compute,
            begin + 70),
      event("Optimizer.step#SGD.step", "user_annotation", begin + 70,
            begin + 90),
      event("aten::_foreach_add_", "cpu_op", begin + 72, begin + 88)};
  if (compute <= 30) events.push_back(add);
  return events;
}

json trace(int rank, int world_size, const json& events) {
  return {
      {"schemaVersion", 1},
      {"distributedInfo",
       {{"backend", "gloo"},
        {"rank", rank},
        {"world_size", world_size},
        {"pg_config", json::array({{{"pg_name", "0"}, {"ranks", {0, 1}}}})}}},
      {"baseTimeNanoseconds", kBase},
      {"traceEvents", events},
      {"traceName", "trace"}};
}

// Returns what Lockstep's profiler adds.
json lockstep_info(int rank, int64_t offset_ns, const std::string& host) {
  return {{"version", 1},
          {"rank", rank},
          {"world_size", 2},
          {"host", host},
          {"pid", 70},
          {"clock_offset_ns", offset_ns},
          {"clock_uncertainty_ns", rank == 0 ? 0 : 1500}};
}

class ReportTrace : public LauncherTest {
 protected:
  void SetUp() override { fs::create_directories(folder_); }

  std::string path(const std::string& name) { return folder_ / name; }
  void write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
  }
  void write_rank(int rank, const json& document) {
    write("rank" + std::to_string(rank) + ".pt.trace.json", document.dump());
  }
  // Both ranks make steps 4 and 5; rank 1 computes longer.
  void write_two_ranks() {
    json first = step_events(4, 1000, 30);
    for (const auto& each : step_events(5, 1100, 30)) first.push_back(each);
    json second = step_events(4, 1000, 50);
    for (const auto& each : step_events(5, 1100, 50)) second.push_back(each);
    write_rank(0, trace(0, 2, first));
    write_rank(1, trace(1, 2, second));
  }
  ProgramResult report(std::vector<std::string> options = {}) {
    options.insert(options.begin(), {"report", "trace"});
    options.push_back(folder_);
    return run_command(options);
  }
  json report_json() {
    const auto result = report({"--json"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const json document = json::parse(result.out);
    EXPECT_EQ(document.at("format"), 1);
    return document;
  }
  json merged() {
    const std::string output = scratch() / "merged.json";
    const auto result = report({"--output", output});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return json::parse(read_file(output));
  }
  // Returns the one line of a refusal.
  std::string refusal(const std::vector<std::string>& options = {}) {
    const auto result = report(options);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
    EXPECT_THAT(result.err, StartsWith("lockstep report trace: "));
    return result.err;
  }
  // Returns the refusal of `text` as a trace.
  std::string mistake(const std::string& text) {
    write("bad.trace.json", text);
    const std::string line = refusal();
    EXPECT_THAT(line, HasSubstr(path("bad.trace.json")));
    return line;
  }

  const fs::path folder_ = scratch() / "traces";
};

TEST_F(ReportTrace, SharesOfAStepAreThoseWorkedOutByHand) {
  write_two_ranks();
  const json document = report_json();
  EXPECT_EQ(document.at("world_size"), 2);
  EXPECT_EQ(document.at("warnings"), json::array());
  const json& ranks = document.at("ranks");
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[0].at("steps"), 2);
  EXPECT_EQ(ranks[0].at("step_ns"), 100'000);
  EXPECT_EQ(ranks[0].at("total_ns"), 200'000);
  const auto expect_shares = [](const json& rank,
                                const std::map<std::string, double>& shares) {
    ASSERT_EQ(rank.at("shares").size(), shares.size());
    for (const auto& [name, share] : shares) {
      EXPECT_DOUBLE_EQ(rank.at("shares").at(name), share) << name;
    }
  };
  // Rank 0 communicates from 40 to 70 us, and adds from 42 to 52 us.
  expect_shares(ranks[0], {{"compute", 0.4},
                           {"optimizer", 0.2},
                           {"exposed", 0.2},
                           {"loader", 0.1},
                           {"snapshot", 0},
                           {"idle", 0.1},
                           {"overlapped", 0.1}});
  expect_shares(ranks[1], {{"compute", 0.5},
                           {"optimizer", 0.2},
                           {"exposed", 0.1},
                           {"loader", 0.1},
                           {"snapshot", 0},
                           {"idle", 0.1},
                           {"overlapped", 0}});
  EXPECT_DOUBLE_EQ(document.at("goodput"), 0.65);
  EXPECT_EQ(document.at("compared_steps"), 2);
  EXPECT_EQ(document.at("stragglers"), json::array({{{"rank", 1},
                                                     {"own_ns", 90'000},
                                                     {"others_ns", 80'000},
                                                     {"spread_ns", 0},
                                                     {"reason", "compute"},
                                                     {"reason_ns", 10'000},
                                                     {"slower_steps", 2}}}));
  EXPECT_EQ(document.at("lost_ns"), 10'000);
  EXPECT_DOUBLE_EQ(document.at("spread"), 1.0 / 9);
  EXPECT_EQ(document.at("flops_per_second"), nullptr);
}

TEST_F(ReportTrace, TableNamesTheStraggler) {
  write_two_ranks();
  const auto result = report();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(
      result.out,
      "rank  steps      step  compute  optimizer  exposed  loader  snapshot    "
      "idle  overlapped\n"
      "0         2  100.0 us   40.0 %     20.0 %   20.0 %  10.0 %     0.0 %  "
      "10.0 %      10.0 %\n"
      "1         2  100.0 us   50.0 %     20.0 %   10.0 %  10.0 %     0.0 %  "
      "10.0 %       0.0 %\n"
      "\n"
      "straggler: rank 1 takes 90.0 us of its own for a step, the others "
      "80.0 us; compute is 10.0 us longer\n"
      "without it a step would be 10.0 us shorter; from step to step the "
      "difference varies by 0.0 us; the ranks' own times differ by 11.1 %\n"
      "goodput: 65.0 %\n"
      "clocks: not compared; right if all ranks ran on one host\n"
      "\n"
      "operator, by itself  calls     time  of a step\n"
      "aten::mm               1.0  40.0 us     40.0 %\n"
      "aten::_foreach_add_    1.0  16.0 us     16.0 %\n"
      "aten::add              0.5   5.0 us      5.0 %\n");
}

TEST_F(ReportTrace, OperationsAreTakenFromTheTraceOrFromTheSizesOfProducts) {
  json events = step_events(1, 0, 30);
  events[2]["args"] = {{"Input Dims", json::parse("[[100,20],[20,50]]")}};
  events.push_back(event("aten::addmm", "cpu_op", 60, 65));
  events.back()["args"] = {{"Input Dims", json::parse("[[3],[2,3],[3,4],[]]")},
                           {"flops", 1'000'000}};
  write_rank(0, trace(0, 1, events));
  const double flops = 2.0 * 100 * 20 * 50 + 1e6;
  EXPECT_DOUBLE_EQ(report_json().at("flops_per_second"), flops / 100e-6);
  EXPECT_THAT(report().out,
              HasSubstr("model: 12 GFLOP/s, 12 GFLOP/s a rank\n"));
}

TEST_F(ReportTrace, ConvolutionsAreCountedOrTheReportSaysThatTheyAreNot) {
  json events = step_events(1, 0, 30);
  events.push_back(event("aten::convolution", "cpu_op", 60, 65));
  write_rank(0, trace(0, 1, events));
  EXPECT_THAT(report().out,
              HasSubstr("model: no operations are counted: record "
                        "their sizes (record_shapes)\n"));
  events[2]["args"] = {{"Input Dims", json::parse("[[100,20],[20,50]]")}};
  write_rank(0, trace(0, 1, events));
  EXPECT_THAT(report().out,
              HasSubstr(" a rank, without the convolutions: record their sizes "
                        "(record_shapes)\n"));
  EXPECT_EQ(report_json().at("uncounted_convolutions"), 1);
  events.back()["args"] = {
      {"Input Dims",
       json::parse("[[2,4,8,8],[8,2,3,3],[8],[],[],[],[],[],[]]")},
      {"Concrete Inputs", json::parse(R"(["", "", "", "[2, 2]", "[1, 1]",
          "[1, 1]", "False", "[0, 0]", "2"])")}};
  write_rank(0, trace(0, 1, events));
  EXPECT_THAT(report().out, HasSubstr(" a rank\n"));
  const double flops = 2.0 * 100 * 20 * 50 + 2.0 * 2 * 8 * 4 * 4 * 2 * 3 * 3;
  EXPECT_DOUBLE_EQ(report_json().at("flops_per_second"), flops / 100e-6);
}

TEST_F(ReportTrace, OperatorsAreListedByTheirOwnTime) {
  const json step = event("ProfilerStep#1", "user_annotation", 0, 100);
  write_rank(
      0, trace(0, 1,
               {step, event("aten::linear", "cpu_op", 0, 50),
                event("aten::addmm", "cpu_op", 5, 35),
                event("aten::relu", "cpu_op", 50, 60),
                event("aten::relu", "cpu_op", 70, 75),
                event("lockstep::comm::all_reduce", "user_annotation", 80, 95),
                // Outside of all steps.
                event("aten::mm", "cpu_op", 200, 300)}));
  EXPECT_THAT(report().out,
              HasSubstr("\n"
                        "operator, by itself  calls     time  of a step\n"
                        "aten::addmm            1.0  30.0 us     30.0 %\n"
                        "aten::linear           1.0  20.0 us     20.0 %\n"
                        "aten::relu             2.0  15.0 us     15.0 %\n"));
  const json operators = report_json().at("operators");
  ASSERT_EQ(operators.size(), 3u);
  EXPECT_EQ(operators[2],
            json({{"name", "aten::relu"}, {"calls", 2}, {"self_ns", 15'000}}));
}

TEST_F(ReportTrace, CyclesOfARankAreItsStepsTogether) {
  write("a.pt.trace.json", trace(0, 1, step_events(7, 500, 50)).dump());
  write("b.pt.trace.json", trace(0, 1, step_events(2, 0, 30)).dump());
  write("notes.json", "not looked at");
  const json document = report_json();
  EXPECT_EQ(document.at("ranks")[0].at("steps"), 2);
  EXPECT_DOUBLE_EQ(document.at("ranks")[0].at("shares").at("compute"), 0.45);
}

TEST_F(ReportTrace, LengthOfAStepIsTheMean) {
  json events;
  double begin = 0;
  for (const double length : {10, 20, 90}) {
    const std::string number = std::to_string(events.size());
    events.push_back(event("ProfilerStep#" + number, "user_annotation", begin,
                           begin + length));
    begin += length;
  }
  write_rank(0, trace(0, 1, events));
  const json rank = report_json().at("ranks")[0];
  EXPECT_EQ(rank.at("step_ns"), 40'000);
  EXPECT_EQ(rank.at("median_step_ns"), 20'000);
  EXPECT_THAT(report().out, HasSubstr("\n0         3  40.0 us"));
}

TEST_F(ReportTrace, StepOfNoLengthIsNotApartFromItself) {
  write_rank(0, trace(0, 1,
                      {event("ProfilerStep#3", "user_annotation", 5, 5),
                       event("aten::mm", "cpu_op", 4, 5)}));
  EXPECT_EQ(report_json().at("warnings"), json::array());
}

TEST_F(ReportTrace, CompressedTracesAreRead) {
  const std::string text = trace(0, 1, step_events(3, 0, 30)).dump();
  gzFile file = gzopen(path("rank0.pt.trace.json.gz").c_str(), "wb");
  ASSERT_EQ(gzwrite(file, text.data(), static_cast<unsigned>(text.size())),
            static_cast<int>(text.size()));
  gzclose(file);
  EXPECT_EQ(report_json().at("ranks")[0].at("step_ns"), 100'000);
  const auto whole = fs::file_size(path("rank0.pt.trace.json.gz"));
  fs::resize_file(path("rank0.pt.trace.json.gz"), whole / 2);
  EXPECT_THAT(refusal(), HasSubstr("the file was cut off"));
}

TEST_F(ReportTrace, ClocksAreAlignedByTheMeasuredOffsets) {
  constexpr int64_t kShift = 5'000'000'000;  // rank 1's clock is ahead
  json first = trace(0, 2, step_events(4, 1000.25, 30));
  json second = trace(1, 2, step_events(4, 5'001'000.75, 50));
  first["lockstep"] = lockstep_info(0, 0, "a");
  second["lockstep"] = lockstep_info(1, -kShift, "b");
  write_rank(0, first);
  write_rank(1, second);
  const auto steps = [](const json& document) {
    std::map<int64_t, double> begins;
    for (const json& each : document.at("traceEvents")) {
      if (each.at("name") == "ProfilerStep#4") {
        begins[each.at("pid")] = each.at("ts");
      }
    }
    return begins;
  };
  const auto aligned = steps(merged());
  EXPECT_THAT(aligned, ElementsAre(std::pair(10, 0), std::pair(20, 0.5)));
  json document = report_json();
  EXPECT_EQ(document.at("clocks"),
            json({{"measured", true}, {"uncertainty_ns", 1500}}));
  EXPECT_EQ(document.at("warnings"), json::array());
  EXPECT_EQ(document.at("ranks")[1].at("host"), "b");
  EXPECT_THAT(report().out,
              HasSubstr("clocks: measured offsets, wrong by at most 1.5 us"));

  // Without the offset the report says that the times do not fit.
  second["lockstep"] = lockstep_info(1, 0, "b");
  second["lockstep"]["clock_uncertainty_ns"] = 0;
  write_rank(1, second);
  const auto apart = steps(merged());
  EXPECT_DOUBLE_EQ(apart.at(20), 5e6 + 0.5);
  document = report_json();
  EXPECT_EQ(document.at("clocks").at("measured"), false);
  ASSERT_EQ(document.at("warnings").size(), 2u);
  EXPECT_THAT(document.at("warnings")[0].get<std::string>(),
              HasSubstr("the clock of rank 1 was not compared"));
  EXPECT_THAT(document.at("warnings")[1].get<std::string>(),
              HasSubstr("step 4 of rank 1 begins 5.00 s after that of rank 0 "
                        "has ended: the clocks differ"));
}

// The profile of one rank ends in a step that the other has hardly begun.
TEST_F(ReportTrace, StepsThatAProfileCutOffSayNothingOfClocks) {
  json first = step_events(4, 1000, 30);
  first.push_back(event("ProfilerStep#5", "user_annotation", 1100, 1110));
  json second = step_events(4, 1000, 50);
  for (const auto& each : step_events(5, 1120, 50)) second.push_back(each);
  write_rank(0, trace(0, 2, first));
  write_rank(1, trace(1, 2, second));
  EXPECT_EQ(report_json().at("warnings"), json::array());
}

TEST_F(ReportTrace, FilesMayCountTheirTimesFromDifferentBases) {
  json first = trace(0, 2, step_events(4, 1000, 30));
  json second = trace(1, 2, step_events(4, 3000, 50));
  second["baseTimeNanoseconds"] = kBase - 2'000'000 + 7;
  write_rank(0, first);
  write_rank(1, second);
  const json document = merged();
  EXPECT_EQ(document.at("baseTimeNanoseconds"), kBase + 1'000'000);
  for (const json& each : document.at("traceEvents")) {
    if (each.at("name") != "ProfilerStep#4") continue;
    EXPECT_DOUBLE_EQ(each.at("ts"), each.at("pid") == 10 ? 0 : 0.007);
  }
}

TEST_F(ReportTrace, MergedTraceHasEveryEventUnderItsRank) {
  const auto metadata = [](const char* name, int pid, const json& args) {
    return json{{"name", name}, {"ph", "M"}, {"pid", pid},
                {"tid", 0},     {"ts", 0},   {"args", args}};
  };
  json events = step_events(4, 1000, 30);
  const size_t timed = events.size() + 3;
  events.push_back({{"ph", "s"},
                    {"id", 5},
                    {"pid", 70},
                    {"tid", 1},
                    {"ts", 1011},
                    {"cat", "fwdbwd"},
                    {"name", "fwdbwd"}});
  events.push_back({{"ph", "f"},
                    {"id", 5},
                    {"pid", 70},
                    {"tid", 1},
                    {"ts", 1042},
                    {"cat", "fwdbwd"},
                    {"name", "fwdbwd"}});
  events.push_back({{"ph", "X"},
                    {"pid", "Spans"},
                    {"tid", "A \"thread\""},
                    {"ts", 990},
                    {"dur", 200},
                    {"cat", "Trace"},
                    {"name", "PyTorch Profiler (0)"},
                    {"args",
                     {{"Op count", 0},
                      {"list", {1, {{"a", nullptr}}}},
                      {"text", "\t\"\\\u00e9"},
                      {"x", 1e-7}}}});
  events.push_back(metadata("process_name", 70, {{"name", "python"}}));
  events.push_back(metadata("process_labels", 70, {{"labels", "CPU"}}));
  events.push_back(metadata("process_sort_index", 70, {{"sort_index", 3}}));
  events.push_back(metadata("process_name", 0, {{"name", "python"}}));
  events.push_back(metadata("process_labels", 0, {{"labels", "GPU 0"}}));
  events.push_back(metadata("thread_name", 70, {{"name", "thread 1"}}));
  for (const int rank : {0, 1}) {
    json document = trace(rank, 2, events);
    document["lockstep"] = lockstep_info(rank, 0, "node1");
    write_rank(rank, document);
  }
  const json document = merged();
  std::map<int64_t, std::string> names;
  std::map<int64_t, int64_t> order;
  std::map<int64_t, std::set<json>> flows;
  std::map<std::string, int> kinds;
  for (const json& each : document.at("traceEvents")) {
    ++kinds[each.at("ph")];
    ASSERT_TRUE(each.at("pid").is_number_integer());
    const int64_t pid = each.at("pid");
    const std::string name = each.at("name");
    if (name == "process_name") names[pid] = each.at("args").at("name");
    if (name == "process_sort_index") {
      order[pid] = each.at("args").at("sort_index");
    }
    if (name == "thread_name") {
      EXPECT_THAT(pid, ::testing::AnyOf(10, 20));
    }
    if (each.contains("id")) flows[pid].insert(each.at("id"));
    if (name == "PyTorch Profiler (0)") {
      EXPECT_EQ(each.at("args"), events[timed - 1].at("args"));
      EXPECT_EQ(each.at("tid"), "A \"thread\"");
      EXPECT_EQ(each.at("dur"), 200);
      EXPECT_EQ(each.at("ts"), 0);
    }
    if (name == "aten::add") {
      EXPECT_EQ(each.at("ts"), 52);
    }
  }
  EXPECT_THAT(names, ElementsAre(std::pair(10, "rank 0 (node1)"),
                                 std::pair(11, "rank 0 (node1): Spans"),
                                 std::pair(12, "rank 0 (node1): GPU 0"),
                                 std::pair(20, "rank 1 (node1)"),
                                 std::pair(21, "rank 1 (node1): Spans"),
                                 std::pair(22, "rank 1 (node1): GPU 0")));
  EXPECT_EQ(order.size(), 6u);
  for (const auto& [pid, index] : order) EXPECT_EQ(pid, index);
  EXPECT_EQ(kinds["X"], static_cast<int>(2 * (timed - 2)));
  EXPECT_EQ(kinds["s"], 2);
  EXPECT_EQ(kinds["M"], 2 * 6 + 2 * 3);  // new names; labels, thread_name
  // Both ends of a flow have one id, and each rank has another.
  ASSERT_EQ(flows.size(), 2u);
  EXPECT_EQ(flows[10].size(), 1u);
  EXPECT_NE(*flows[10].begin(), *flows[20].begin());

  // The merged trace in the same folder is not taken for a rank's.
  write("merged.trace.json", document.dump());
  EXPECT_EQ(report_json().at("ranks").size(), 2u);
}

TEST_F(ReportTrace, MissingRankIsNamedAndTheOthersAreReported) {
  for (const int rank : {0, 1, 3}) {
    write_rank(rank, trace(rank, 4, step_events(4, 1000, 30)));
  }
  const auto result = report();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err,
            "lockstep report trace: warning: no trace of rank 2 of 4 ranks\n");
  EXPECT_THAT(result.out, HasSubstr("\n3         1  100.0 us"));
  EXPECT_THAT(result.out, HasSubstr("straggler: none; "));
  EXPECT_EQ(report_json().at("missing"), json({2}));
}

TEST_F(ReportTrace, TraceWithoutStepsCountsAsOneStep) {
  json events = step_events(4, 1000, 30);
  events[0]["name"] = "PyTorch Profiler (0)";
  events[0]["dur"] = 500;
  json document = trace(0, 1, events);
  document.erase("distributedInfo");
  write("only.json", document.dump());
  const auto result = report();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("only.json has no steps (ProfilerStep#): all of "
                              "it counts as one"),
                    EndsWith("; give the profiler a schedule, and call its "
                             "step() after each iteration\n")));
  EXPECT_THAT(result.out, HasSubstr("\n0         1  90.0 us   44.4 %"));
  EXPECT_EQ(report_json().at("whole_traces"), true);
}

TEST_F(ReportTrace, RanksWithoutACommonStepAreNotCompared) {
  write_rank(0, trace(0, 2, step_events(4, 1000, 30)));
  write_rank(1, trace(1, 2, step_events(5, 1100, 50)));
  const json document = report_json();
  EXPECT_EQ(document.at("compared_steps"), 0);
  EXPECT_THAT(document.at("warnings")[0].get<std::string>(),
              HasSubstr("no step in common"));
}

TEST_F(ReportTrace, FoldersWithoutTracesAreNamed) {
  fs::remove(folder_);
  EXPECT_THAT(refusal(), HasSubstr("traces: No such file or directory; give "
                                   "the folder with the ranks' traces\n"));
  std::ofstream(folder_.string()) << "a file";
  EXPECT_THAT(refusal(), HasSubstr("traces: Not a directory; "));
  fs::remove(folder_);
  fs::create_directories(folder_);
  EXPECT_THAT(refusal(), HasSubstr("traces has no trace: no file is named"));
}

TEST_F(ReportTrace, FilesThatAreNoTracesAreNamedWithThePlace) {
  EXPECT_THAT(mistake(""), HasSubstr("bad.trace.json is empty"));
  EXPECT_THAT(mistake("[]"), HasSubstr("the document must be an object"));
  EXPECT_THAT(mistake("3"), HasSubstr("is not a trace of a profiler"));
  EXPECT_THAT(mistake("{}"), HasSubstr("it has no \"traceEvents\""));
  const std::string whole = trace(0, 1, step_events(4, 1000, 30)).dump();
  EXPECT_THAT(mistake(whole.substr(0, 400)),
              HasSubstr("ends in the middle, after byte 400: was the program "
                        "killed while it wrote?"));
  std::string wrong = whole;
  wrong[399] = '\x01';
  EXPECT_THAT(mistake(wrong), HasSubstr("is not JSON at byte 400: "));
  EXPECT_THAT(
      mistake(whole + "}"),
      HasSubstr("is not JSON at byte " + std::to_string(whole.size() + 1)));
  const auto damaged = [&](const char* at, const json& value) {
    json document = trace(0, 1, step_events(4, 1000, 30));
    document["lockstep"] = lockstep_info(0, 0, "a");
    document["lockstep"]["world_size"] = 1;
    document[json::json_pointer(at)] = value;
    return mistake(document.dump());
  };
  EXPECT_THAT(damaged("/distributedInfo/rank", "x"),
              HasSubstr(": distributedInfo.rank is x; allowed is a whole "
                        "number from 0 to 1048575\n"));
  EXPECT_THAT(damaged("/distributedInfo/rank", 1),
              HasSubstr(" is of rank 1 in a world of size 1"));
  EXPECT_THAT(damaged("/distributedInfo/world_size", 0),
              HasSubstr("distributedInfo.world_size is 0; "));
  EXPECT_THAT(damaged("/lockstep/version", 2), HasSubstr("version is 2; "));
  EXPECT_THAT(damaged("/lockstep/host", "\x1b[31m"),
              HasSubstr("lockstep.host is ?[31m; "));
  EXPECT_THAT(damaged("/lockstep/clock_offset_ns", 1e300),
              HasSubstr("lockstep.clock_offset_ns is 1e+300; "));
  EXPECT_THAT(damaged("/baseTimeNanoseconds", 0.5),
              HasSubstr("baseTimeNanoseconds is 0.5; "));
  EXPECT_THAT(damaged("/traceEvents/1", 3), HasSubstr("traceEvents[1] is 3; "));
  EXPECT_THAT(damaged("/traceEvents/1", json::array()),
              HasSubstr("traceEvents[1] is a list; "));
  EXPECT_THAT(damaged("/traceEvents/2/ts", "soon"),
              HasSubstr("traceEvents[2].ts is soon; "));
  EXPECT_THAT(damaged("/traceEvents/2/ts", 1e18),
              HasSubstr("at most 73 years"));
  EXPECT_THAT(damaged("/traceEvents/2/dur", -1), HasSubstr(".dur is -1; "));
  EXPECT_THAT(damaged("/traceEvents/2/pid", json::array()),
              HasSubstr("traceEvents[2].pid is "));
  EXPECT_THAT(damaged("/traceEvents/2/name", "ProfilerStep#4"),
              HasSubstr("has step 4 twice"));
  EXPECT_THAT(damaged("/traceEvents/2/name", "ProfilerStep#5"),
              HasSubstr("step 5 begins before step 4 has ended"));
  EXPECT_THAT(damaged("/traceEvents", json::array()),
              HasSubstr(" has no events, and "));
  // Sizes that are not lists of numbers tell nothing.
  json odd = trace(0, 1, step_events(4, 1000, 30));
  odd["traceEvents"][2]["args"] = {
      {"Input Dims", {{"a", {{"b", 3}}}, {"c", {1, {2}}}}}};
  write("bad.trace.json", odd.dump());
  EXPECT_EQ(report().exit_code, 0);
  EXPECT_THAT(mistake("{\"traceEvents\": [{\"args\": " +
                      std::string(100'000, '[') + "0"),
              HasSubstr("ends in the middle"));
}

TEST_F(ReportTrace, FilesThatDoNotBelongTogetherAreNamed) {
  const json one = trace(0, 2, step_events(4, 1000, 30));
  write_rank(0, one);
  write("again.trace.json", one.dump());
  EXPECT_THAT(refusal(), AllOf(HasSubstr("again.trace.json and "),
                               HasSubstr("are both of rank 0 and of the same "
                                         "time; give one trace")));
  write("again.trace.json", trace(0, 2, step_events(4, 9000, 30)).dump());
  EXPECT_THAT(refusal(), HasSubstr("both have step 4 of rank 0"));
  write("again.trace.json", trace(1, 3, step_events(4, 1000, 30)).dump());
  EXPECT_THAT(refusal(), HasSubstr(" is of a world of size "));
  json none = one;
  none.erase("distributedInfo");
  write("again.trace.json", none.dump());
  EXPECT_THAT(refusal(),
              HasSubstr("again.trace.json names no rank "
                        "(distributedInfo.rank), and is not the only trace"));
}

TEST_F(ReportTrace, OutputThatCannotBeWrittenIsNamedAndLeavesNothing) {
  write_two_ranks();
  const std::string input = path("rank0.pt.trace.json");
  const std::string before = read_file(input);
  EXPECT_THAT(refusal({"--output", input}), HasSubstr(" is one of the traces"));
  EXPECT_EQ(read_file(input), before);
  EXPECT_THAT(refusal({"--output", path("none/merged.json")}),
              HasSubstr("none/merged.json cannot be written: No such file"));
  EXPECT_THAT(refusal({"--output", folder_.string()}),
              HasSubstr("traces cannot be written: "));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 2);
  EXPECT_EQ(std::distance(fs::directory_iterator(scratch()), {}), 1);
}

TEST_F(ReportTrace, OutputMayBeAPipeOrALink) {
  write_two_ranks();
  const json expected = merged();
  const fs::path link = scratch() / "link";
  const fs::path target = folder_ / "target.txt";
  fs::create_symlink("traces/target.txt", link);
  for (const char* state : {"missing", "there"}) {
    EXPECT_EQ(report({"--output", link}).exit_code, 0) << state;
    EXPECT_TRUE(fs::is_symlink(link));
    ASSERT_TRUE(fs::is_regular_file(target));
    EXPECT_EQ(json::parse(read_file(target)), expected);
    std::ofstream(target) << "old";
  }
  fs::remove(link);
  fs::create_symlink("link", link);
  EXPECT_THAT(refusal({"--output", link}),
              HasSubstr("link cannot be written: "));
  EXPECT_TRUE(fs::is_symlink(link));

  const fs::path pipe = scratch() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  // Opened first, so that the command need not wait for a reader; the few
  // events fit into the pipe.
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  EXPECT_EQ(report({"--output", pipe}).exit_code, 0);
  EXPECT_TRUE(fs::is_fifo(pipe));
  std::string written(1 << 16, '\0');
  const auto bytes = ::read(reader, written.data(), written.size());
  ::close(reader);
  ASSERT_GT(bytes, 0);
  EXPECT_EQ(json::parse(written.substr(0, static_cast<size_t>(bytes))),
            expected);

  // The report and then the merged trace.
  const auto both = report({"--output", "/dev/stdout"});
  EXPECT_EQ(both.exit_code, 0) << both.err;
  const auto begin = both.out.find('{');
  ASSERT_NE(begin, both.out.npos);
  EXPECT_THAT(both.out, StartsWith("rank  steps"));
  EXPECT_EQ(json::parse(both.out.substr(begin)), expected);
}

TEST_F(ReportTrace, MisuseIsOneLineAndHelpHasExamples) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {"report"},
           {"report", "trase", "x"},
           {"report", "trace"},
           {"report", "trace", "x", "y"},
           {"report", "trace", "--jsn", "x"}}) {
    const auto result = run_command(arguments);
    EXPECT_EQ(result.exit_code, 2) << ::testing::PrintToString(arguments);
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
    EXPECT_THAT(result.err,
                AllOf(StartsWith("lockstep report"), HasSubstr("--help")));
  }
  const auto help = run_command({"report", "trace", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("Examples:"), HasSubstr("--output")));
}

}  // namespace
}  // namespace lockstep::internal::testing
