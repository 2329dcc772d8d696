// `lockstep inspect flight` on records written for the test: what it finds, and
// its errors for files that are not records.
#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kStart = 1'700'000'000 * kSecond;

// Returns the n-th collective of a rank, begun n seconds after kStart; the
// fields in `other` replace the usual ones.
json call(int64_t number, const json& other = json::object()) {
  json entry{{"record_id", number},
             {"collective_seq_id", number},
             {"is_p2p", false},
             {"operation", "all_reduce"},
             {"dtype", "Float"},
             {"reduce_op", "SUM"},
             {"peer", nullptr},
             {"in_elements", 1000},
             {"out_elements", 1000},
             {"state", "completed"},
             {"time_created_ns", kStart + number * kSecond},
             {"time_ended_ns", kStart + number * kSecond + kSecond / 2},
             {"thread", 1}};
  entry.update(other);
  return entry;
}

const json kStarted{{"state", "started"}, {"time_ended_ns", nullptr}};
const json kFailed{{"state", "failed"}};

json with(json entry, const json& other) {
  entry.update(other);
  return entry;
}

json group_of(int rank, const std::vector<json>& calls, int world_size) {
  json ranks = json::array();
  for (int i = 0; i < world_size; ++i) ranks.push_back(i);
  int64_t last = 0;
  for (const auto& entry : calls) {
    last = std::max(last, entry.at("collective_seq_id").get<int64_t>());
  }
  return {{"process_group", "default_pg"},
          {"backend", "cpu:gloo"},
          {"rank", rank},
          {"ranks", ranks},
          {"capacity", 1024},
          {"last_record_id", calls.size()},
          {"last_collective_seq_id", last},
          {"entries", calls}};
}

// Returns a record written 60 s after kStart.
json record(int rank, const std::vector<json>& calls, int world_size = 3) {
  return {{"format", "lockstep-flight"},
          {"version", 1},
          {"job", "29500"},
          {"rank", rank},
          {"world_size", world_size},
          {"host", "here"},
          {"pid", 1000 + rank},
          {"reason", "signal"},
          {"time_ns", kStart + 60 * kSecond},
          {"groups", {group_of(rank, calls, world_size)}}};
}

class InspectFlight : public LauncherTest {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    const auto path = scratch() / name;
    std::ofstream(path) << text;
    return path;
  }
  ProgramResult inspect(const std::vector<json>& records,
                        std::vector<std::string> options = {}) {
    std::vector<std::string> arguments{"inspect", "flight"};
    for (auto& option : options) arguments.push_back(option);
    for (size_t i = 0; i < records.size(); ++i) {
      arguments.push_back(
          write("record" + std::to_string(i) + ".json", records[i].dump()));
    }
    return run_command(arguments);
  }
  // Returns the only group in the output of --json.
  json group_found(const std::vector<json>& records, int exit_code) {
    const auto result = inspect(records, {"--json"});
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    const json document = json::parse(result.out);
    EXPECT_EQ(document.at("format"), 1);
    EXPECT_EQ(document.at("diverged"), exit_code == 1);
    EXPECT_EQ(document.at("groups").size(), 1u);
    return document.at("groups")[0];
  }
  // Returns the one-line error for `text` as a record.
  std::string mistake(const std::string& text) {
    const auto path = write("bad.json", text);
    const auto result = run_command({"inspect", "flight", path});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
    EXPECT_THAT(result.err, StartsWith("lockstep inspect flight: " + path));
    return result.err;
  }
};

TEST_F(InspectFlight, RanksThatCalledTheSameAreConsistent) {
  const std::vector<json> calls{call(1), call(2)};
  const auto result =
      inspect({record(0, calls), record(1, calls), record(2, calls)});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("job 29500, 3 ranks\n"),
                    HasSubstr("group default_pg (ranks 0-2): no divergence\n"),
                    HasSubstr("no divergence from #1 to #2")));
}

TEST_F(InspectFlight, RankThatCalledSomethingElseIsNamedWithBothCalls) {
  const json broadcast{
      {"operation", "broadcast"}, {"reduce_op", nullptr}, {"peer", 1}};
  const std::vector<json> records{
      record(0, {call(1), call(2, kStarted)}),
      record(1, {call(1), with(call(2, kStarted), broadcast)}),
      record(2, {call(1), call(2, kStarted)})};
  const auto result = inspect(records);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.out,
      AllOf(HasSubstr("rank 1 diverged at #2\n"),
            HasSubstr("rank 1 called broadcast Float[1000] root 1 while ranks "
                      "0, 2 called all_reduce SUM Float[1000]: different "
                      "operation\n"),
            HasSubstr("#2      all_reduce SUM Float[1000]    started  for "
                      "58.00 s\n")));
  const json group = group_found(records, 1);
  EXPECT_EQ(group.at("verdict"), "mismatch");
  EXPECT_EQ(group.at("collective_seq_id"), 2);
  EXPECT_EQ(group.at("diverged_ranks"), json({1}));
  EXPECT_EQ(group.at("calls")[1].at("call"), "broadcast Float[1000] root 1");
}

TEST_F(InspectFlight, EachFieldThatRanksMustAgreeOnIsCompared) {
  const std::vector<std::pair<json, std::string>> cases{
      {{{"dtype", "Double"}}, "different dtype"},
      {{{"reduce_op", "MAX"}}, "different reduce operation"},
      {{{"in_elements", 1001}, {"out_elements", 1001}}, "different elements"},
      {{{"peer", 1}}, "different root"},
      {{{"dtype", "Half"}, {"peer", 1}}, "different dtype, root"}};
  for (const auto& [other, words] : cases) {
    const json group = group_found({record(0, {call(1)}), record(1, {call(1)}),
                                    record(2, {call(1, other)})},
                                   1);
    EXPECT_EQ(group.at("diverged_ranks"), json({2}));
    EXPECT_THAT(group.at("findings")[0].get<std::string>(), EndsWith(words));
  }
}

// Only the root of a gather or scatter has both sides in full, and the parts of
// all_to_all may all differ.
TEST_F(InspectFlight, ElementsThatDifferByNatureAreNoDivergence) {
  auto of = [](const char* operation, int in, int out) {
    return json{
        {"operation", operation}, {"in_elements", in}, {"out_elements", out}};
  };
  const std::vector<json> root{
      call(1, of("gather", 5, 15)), call(2, of("scatter", 15, 5)),
      call(3, of("all_to_all", 9, 2)), call(4, of("broadcast", 7, 0))};
  const std::vector<json> other{
      call(1, of("gather", 5, 0)), call(2, of("scatter", 0, 5)),
      call(3, of("all_to_all", 4, 8)), call(4, of("broadcast", 0, 7))};
  const json group =
      group_found({record(0, root), record(1, other), record(2, other)}, 0);
  EXPECT_EQ(group.at("verdict"), "consistent");
}

TEST_F(InspectFlight, OfTwoRanksThatDisagreeNeitherIsRight) {
  const json group = group_found(
      {record(0, {call(1)}, 2), record(1, {call(1, {{"dtype", "Double"}})}, 2)},
      1);
  EXPECT_EQ(group.at("diverged_ranks"), json({0, 1}));
}

TEST_F(InspectFlight, RankThatDidNotComeIsNamedWithItsLastCall) {
  const std::vector<json> stuck{call(1), call(2), call(3, kStarted)};
  const std::vector<json> records{record(0, stuck), record(1, stuck),
                                  record(2, {call(1), call(2)})};
  const json group = group_found(records, 1);
  EXPECT_EQ(group.at("verdict"), "absent");
  EXPECT_EQ(group.at("collective_seq_id"), 3);
  EXPECT_EQ(group.at("diverged_ranks"), json({2}));
  const auto result = inspect(records);
  EXPECT_THAT(
      result.out,
      AllOf(HasSubstr("rank 2 did not come to #3\n"),
            HasSubstr("its last was #2 all_reduce SUM Float[1000], which "
                      "completed 57.50 s before its record\n"),
            HasSubstr("ranks 0, 1 are inside and wait\n"),
            HasSubstr("(did not come)\n")));
}

TEST_F(InspectFlight, RankThatFellBehindCallsAgoIsFoundWhereItLeft) {
  // Asynchronous calls queue up after the one that rank 1 did not make.
  const json scheduled{{"state", "scheduled"}, {"time_ended_ns", nullptr}};
  const std::vector<json> ahead{call(1), call(2, scheduled), call(3, scheduled),
                                call(4, kStarted)};
  const json group = group_found(
      {record(0, ahead), record(1, {call(1)}), record(2, ahead)}, 1);
  EXPECT_EQ(group.at("collective_seq_id"), 2);
  EXPECT_EQ(group.at("diverged_ranks"), json({1}));
}

TEST_F(InspectFlight, RankWithoutARecordIsSuspectWhereOthersFailed) {
  const std::vector<json> calls{call(1), call(2, kFailed)};
  const json group = group_found({record(0, calls), record(2, calls)}, 1);
  EXPECT_EQ(group.at("verdict"), "no record");
  EXPECT_EQ(group.at("diverged_ranks"), json({1}));
  EXPECT_THAT(group.at("findings").dump(),
              AllOf(HasSubstr("no record of rank 1"),
                    HasSubstr("it failed on ranks 0, 2")));
  // A missing record is not a finding if no call failed.
  EXPECT_EQ(group_found({record(0, {call(1)})}, 0).at("verdict"), "consistent");
}

TEST_F(InspectFlight, SameCallThatFailedOrRunsEverywhereIsNoDivergence) {
  for (const json& state : {kFailed, kStarted}) {
    const std::vector<json> calls{call(1), call(2, state)};
    const json group =
        group_found({record(0, calls), record(1, calls), record(2, calls)}, 0);
    EXPECT_EQ(group.at("verdict"), state == kFailed ? "failed" : "waiting");
    EXPECT_EQ(group.at("collective_seq_id"), 2);
    EXPECT_EQ(group.at("diverged_ranks"), json::array());
  }
}

TEST_F(InspectFlight, GroupsAreComparedApartAndNamed) {
  auto first = record(0, {call(1)}, 2);
  auto second = record(1, {call(1)}, 2);
  auto other = group_of(0, {call(1, kStarted)}, 2);
  other["process_group"] = "1";
  first["groups"].push_back(other);
  const auto result = inspect({first, second});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.out,
      AllOf(HasSubstr("group default_pg (ranks 0, 1): no divergence\n"),
            HasSubstr("group 1 (ranks 0, 1): rank 1 did not come to #1\n"),
            HasSubstr("has not made this group yet, or has destroyed it")));
}

TEST_F(InspectFlight, MessagesThatWaitAreListed) {
  const json message{{"record_id", 2},
                     {"collective_seq_id", 0},
                     {"operation", "irecv"},
                     {"reduce_op", nullptr},
                     {"in_elements", 0},
                     {"state", "scheduled"},
                     {"peer", 1}};
  const json group = group_found(
      {record(0, {call(1), call(2, message)}, 2), record(1, {call(1)}, 2)}, 0);
  EXPECT_EQ(group.at("messages"),
            json({"rank 0: irecv Float[1000] from rank 1, for 58.00 s"}));
}

TEST_F(InspectFlight, RecordOlderThanTheOthersCallsIsSaidToBe) {
  auto old = record(1, {call(1)}, 2);
  old["time_ns"] = kStart + 1'900'000'000;
  const json group =
      group_found({record(0, {call(1), call(2, kStarted)}, 2), old}, 1);
  EXPECT_THAT(group.at("findings")[0].get<std::string>(),
              HasSubstr("written before others came here"));
}

TEST_F(InspectFlight, EachMistakeInAFileIsOneLineThatNamesIt) {
  EXPECT_THAT(mistake(""), HasSubstr(" is not JSON at byte 1; "));
  EXPECT_THAT(mistake("{\"format\": \"lockstep-flight\", "), HasSubstr("JSON"));
  EXPECT_THAT(mistake("[]"), HasSubstr("the document is not an object"));
  EXPECT_THAT(mistake("{}"), HasSubstr("is not a flight record of Lockstep"));
  auto damaged = [&](const std::string& at, const json& value) {
    json whole = record(0, {call(1), call(2)});
    whole[json::json_pointer(at)] = value;
    return mistake(whole.dump());
  };
  EXPECT_THAT(damaged("/version", 2),
              HasSubstr(": version is 2; allowed is a whole number from 1 to "
                        "1\n"));
  EXPECT_THAT(damaged("/rank", 3), HasSubstr(": rank is 3;"));
  EXPECT_THAT(damaged("/rank", 0.5), HasSubstr(": rank is 0.5;"));
  EXPECT_THAT(damaged("/pid", uint64_t{1} << 63), HasSubstr(": pid is 92"));
  EXPECT_THAT(damaged("/world_size", -1), HasSubstr(": world_size is -1;"));
  EXPECT_THAT(damaged("/job", json::array()), HasSubstr(": job is array;"));
  EXPECT_THAT(damaged("/host", "\x1b[31m"), HasSubstr("printable ASCII"));
  EXPECT_THAT(damaged("/groups", nullptr), HasSubstr(": groups is null;"));
  EXPECT_THAT(damaged("/groups/0", 1),
              HasSubstr(": groups[0] is not an object"));
  EXPECT_THAT(damaged("/groups/0/ranks", json({0, 0})),
              HasSubstr(": groups[0].ranks is array; allowed is different"));
  EXPECT_THAT(damaged("/groups/0/ranks", json({1, 2})),
              HasSubstr("a list with rank 0"));
  EXPECT_THAT(damaged("/groups/0/entries/1/state", "asleep"),
              HasSubstr(": groups[0].entries[1].state is \"asleep\";"));
  EXPECT_THAT(damaged("/groups/0/entries/1/record_id", 1),
              HasSubstr("more than that of the entry before"));
  EXPECT_THAT(damaged("/groups/0/entries/1/collective_seq_id", 9),
              HasSubstr("collective_seq_id is 9;"));
  json missing = record(0, {call(1)});
  missing["groups"][0]["entries"][0].erase("operation");
  EXPECT_THAT(mistake(missing.dump()),
              HasSubstr(".operation is missing; allowed is a text"));
}

TEST_F(InspectFlight, NestingWithoutEndIsRefusedLikeAnythingElse) {
  EXPECT_THAT(mistake("{\"format\": " + std::string(100'000, '[') +
                      std::string(100'000, ']') + "}"),
              HasSubstr("is not a flight record"));
  json whole = record(0, {});
  auto text = whole.dump();
  const std::string host = "\"here\"";
  text.replace(text.find(host), host.size(),
               std::string(100'000, '[') + std::string(100'000, ']'));
  EXPECT_THAT(mistake(text), HasSubstr(": host is array;"));
}

TEST_F(InspectFlight, FilesThatAreNoRecordsAreNamedWithTheReason) {
  const auto none =
      run_command({"inspect", "flight", (scratch() / "none.json").string()});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_THAT(none.err, EndsWith("none.json: No such file or directory\n"));
  const auto folder = run_command({"inspect", "flight", scratch().string()});
  EXPECT_EQ(folder.exit_code, 2);
  EXPECT_THAT(folder.err, HasSubstr(" is not a file; "));
  const auto large = scratch() / "large.json";
  std::ofstream(large).close();
  std::filesystem::resize_file(large, (int64_t{64} << 20) + 1);
  EXPECT_THAT(run_command({"inspect", "flight", large}).err,
              HasSubstr("67108865 bytes; allowed are 67108864"));
}

TEST_F(InspectFlight, RecordsOfDifferentJobsAreNotCompared) {
  auto refused = [&](const std::vector<json>& records) {
    const auto result = inspect(records);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    return result.err;
  };
  EXPECT_THAT(refused({record(0, {}), record(0, {})}),
              HasSubstr("are both of rank 0; give one record for each rank"));
  EXPECT_THAT(refused({record(0, {}, 2), record(1, {}, 3)}),
              HasSubstr("is of a world of size 3"));
  auto other = record(1, {});
  other["job"] = "29501";
  EXPECT_THAT(refused({record(0, {}), other}),
              AllOf(HasSubstr("record1.json is of job 29501"),
                    HasSubstr("record0.json of job 29500")));
  other["job"] = nullptr;  // the job is not known
  EXPECT_EQ(inspect({record(0, {}), other}).exit_code, 0);
}

TEST_F(InspectFlight, MisuseIsOneLineAndCodeTwo) {
  const auto file = write("one.json", record(0, {}, 1).dump());
  const std::vector<std::vector<std::string>> cases{
      {"inspect"},
      {"inspect", "fligt", file},
      {"inspect", "flight"},
      {"inspect", "flight", "--jsn", file}};
  for (const auto& arguments : cases) {
    const auto result = run_command(arguments);
    EXPECT_EQ(result.exit_code, 2) << ::testing::PrintToString(arguments);
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
    EXPECT_THAT(result.err,
                AllOf(StartsWith("lockstep inspect"), HasSubstr("--help")));
  }
  const auto help = run_command({"inspect", "flight", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.out, HasSubstr("lockstep inspect flight [--json] FILE..."));
}

TEST_F(InspectFlight, LongRankListsAndTablesAreCut) {
  constexpr int kRanks = 100;
  std::vector<json> records;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == 50) continue;
    records.push_back(record(rank, {call(1, kStarted)}, kRanks));
  }
  const auto result = inspect(records);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.out,
      AllOf(HasSubstr("rank 50 left no record while others are at #1\n"),
            HasSubstr("ranks 0-49, 51-99 are inside and wait\n"),
            HasSubstr("(no record)\n"), HasSubstr("  and 68 more ranks\n")));
}

}  // namespace
}  // namespace lockstep::internal::testing
