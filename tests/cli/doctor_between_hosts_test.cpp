// `lockstep doctor` on several nodes: on one host, and on hosts that are really
// separate.
#include <gmock/gmock.h>
#include <signal.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/harness/network_hosts.h"
#include "tests/launch/nodes.h"

namespace lockstep::internal::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// The checks of a document by name.
using Checks = std::map<std::string, json>;

Checks checks_of(const ProgramResult& result) {
  const json document = json::parse(result.out, nullptr, false);
  Checks checks;
  if (!document.is_object()) {
    ADD_FAILURE() << result.out << result.err;
    return checks;
  }
  EXPECT_EQ(result.exit_code, document["health"] == "fail" ? 1 : 0);
  for (const auto& check : document["checks"]) checks[check["name"]] = check;
  return checks;
}

class DoctorNodes : public NodesTest {
 protected:
  // Without the programs that link LibTorch it takes no time before the nodes
  // meet.
  void SetUp() override {
    fs::create_directories(scratch() / "bin");
    fs::create_directories(scratch() / "lib");
    command_ = scratch() / "bin/lockstep";
    fs::copy_file(LOCKSTEP_BIN_DIR "/lockstep", command_);
    set_for_all(std::string("LOCKSTEP_MODULE_PATH=") + LOCKSTEP_BIN_DIR +
                "/../lib/lockstep");
  }

  std::unique_ptr<RunningProgram> start_doctor(
      std::vector<std::string> options,
      const std::vector<std::string>& prefix = {}, ProgramSetup setup = {}) {
    return start_program(
        with(with(prefix, {command_, "doctor"}), std::move(options)), setup);
  }

  std::string command_;
};

TEST_F(DoctorNodes, EachScreenEndsWithTheSameVerdict) {
  auto first = start_doctor(with(meeting(endpoint(), 2, 0), {"--json"}));
  auto second = start_doctor(with(meeting(endpoint(), 2, 1), {"--json"}));
  const auto one = checks_of(first->finish(seconds(90)));
  const auto two = checks_of(second->finish(seconds(90)));
  ASSERT_EQ(one.count("nodes") + two.count("nodes"), 2u);
  EXPECT_EQ(one.at("nodes"), two.at("nodes"));
  EXPECT_THAT(std::string(one.at("nodes")["found"]),
              HasSubstr("2 nodes and 1 link"));
  // The first shows the rest.
  EXPECT_EQ(one.count("node 0") + one.count("node 1"), 2u);
  EXPECT_EQ(two.count("node 0") + two.count("node 1"), 0u);
  const json link = one.count("links") == 1
                        ? one.at("links")["values"]["link 0-1"]
                        : one.at("link 0-1")["values"];
  for (const char* way : {"there", "back"}) {
    EXPECT_EQ(link[way]["error"], nullptr) << link;
    EXPECT_GT(link[way]["round_trip_us"], 0) << link;
    EXPECT_GT(link[way]["bytes_per_second"], 0) << link;
  }
}

TEST_F(DoctorNodes, PeopleGetALinePerNode) {
  auto second = start_doctor(meeting(endpoint(), 2));
  auto first = start_doctor(meeting(endpoint(), 2));
  const auto one = first->finish(seconds(90));
  const auto two = second->finish(seconds(90));
  const std::string all = one.out + two.out;
  // A name is followed by blanks. The line of a slow link has "node 0 (name)".
  EXPECT_EQ(count(all, " node 0  "), 1) << all;
  EXPECT_EQ(count(all, " node 1  "), 1) << all;
  EXPECT_EQ(count(all, "2 nodes and 1 link"), 2) << all;
  EXPECT_EQ(count(one.out, " nodes  "), 1) << one.out;
}

TEST_F(DoctorNodes, AnAbsentNodeIsNamedAtTheDeadline) {
  auto only = start_doctor(with(meeting(endpoint(), 3, 1),
                                {"--rdzv-conf=join_timeout=1", "--json"}));
  const auto result = only->finish(seconds(60));
  auto checks = checks_of(result);
  EXPECT_THAT(result.err, HasSubstr("waiting for nodes 0 and 2 of 3"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(checks["node 0"]["found"], "absent");
  EXPECT_NE(checks["node 1"]["found"], "absent");
  EXPECT_EQ(checks["node 2"]["found"], "absent");
  EXPECT_THAT(std::string(checks["nodes"]["found"]),
              HasSubstr("fail: node 0, node 2"));
}

TEST_F(DoctorNodes, AnotherSecretIsOneLineOnThatNode) {
  auto first = start_doctor(
      with(meeting(endpoint(), 2, 0), {"--rdzv-conf=join_timeout=20"}));
  await_store();
  auto other = start_doctor(
      meeting(endpoint(), 2, 1), {},
      {.environment = {"LOCKSTEP_JOB_SECRET=another secret of 20"}});
  const auto result = other->finish(seconds(60));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("\nfail  nodes "), HasSubstr("secret"),
                    Not(HasSubstr("another secret of 20"))));
  EXPECT_EQ(first->finish(seconds(60)).exit_code, 1);
}

TEST_F(DoctorNodes, TheSameRankTwiceNamesBoth) {
  auto first = start_doctor(
      with(meeting(endpoint(), 2, 1), {"--rdzv-conf=join_timeout=10"}));
  await_store();
  first->await_error("waiting for node 0");
  const auto second =
      start_doctor(meeting(endpoint(), 2, 1))->finish(seconds(60));
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.out, HasSubstr("two nodes have --node-rank=1"));
}

TEST_F(DoctorNodes, AMistakeIsOneLineBeforeAnythingIsExamined) {
  const std::map<std::vector<std::string>, std::string> mistakes{
      {{"--nnodes=x"}, "--nnodes is \"x\""},
      {{"--nnodes=2"}, "give all of them the same --rdzv-endpoint"},
      {{"--nnodes=2", "--rdzv-endpoint=0.0.0.0"}, "every interface"},
      {{"--nnodes=2", "--rdzv-endpoint=a", "--node-rank=2"}, "--node-rank"},
      {{"--nnodes=2", "--rdzv-endpoint=a", "--rdzv-insecure"},
       "--rdzv-insecure does without a secret"}};
  for (const auto& [options, text] : mistakes) {
    const auto result = start_doctor(options)->finish();
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, HasSubstr(text));
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
  }
}

TEST_F(DoctorNodes, TheDeathOfTheStoresHostEndsTheWait) {
  auto first = start_doctor(
      with(meeting(endpoint(), 3, 0), {"--rdzv-conf=join_timeout=300"}));
  await_store();
  auto second = start_doctor(with(meeting(endpoint(), 3, 1),
                                  {"--rdzv-conf=join_timeout=300", "--json"}));
  second->await_error("waiting for node 2");
  first->signal(SIGKILL);
  const auto result = second->finish(seconds(30));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(std::string(checks_of(result)["nodes"]["found"]),
              HasSubstr("was lost: the node that hosts it has ended"));
  EXPECT_TRUE(await_no_process(seconds(60)));
}

class DoctorBetweenHosts : public DoctorNodes {
 protected:
  void SetUp() override {
    if (!hosts_.made()) GTEST_SKIP() << hosts_.obstacle();
    DoctorNodes::SetUp();
  }
  void TearDown() override {
    nodes_.clear();
    DoctorNodes::TearDown();
  }

  // Runs the doctor on all hosts; returns the checks of the first one.
  Checks examine(const std::vector<std::string>& on_host_2 = {}) {
    for (int host = 0; host < 3; ++host) {
      auto prefix = hosts_.command_on(host);
      if (host == 2) prefix = with(prefix, on_host_2);
      nodes_.push_back(start_doctor(
          with(meeting(NetworkHosts::address(0) + ":29400", 3, host),
               {"--json"}),
          prefix));
    }
    std::vector<Checks> all;
    for (auto& node : nodes_) {
      all.push_back(checks_of(node->finish(seconds(120))));
    }
    EXPECT_EQ(all[0]["nodes"], all[1]["nodes"]);
    EXPECT_EQ(all[0]["nodes"], all[2]["nodes"]);
    return all[0];
  }

  NetworkHosts hosts_{3};
  std::vector<std::unique_ptr<RunningProgram>> nodes_;
};

TEST_F(DoctorBetweenHosts, ASlowLinkIsNamed) {
  ASSERT_TRUE(hosts_.slow_down(1, 2, "20mbit"));
  auto checks = examine();
  const json link = checks["link 1-2"];
  EXPECT_EQ(link["health"], "warn") << link;
  EXPECT_THAT(std::string(link["found"]),
              AllOf(HasSubstr("node 1 ("), HasSubstr("node 2 (")));
  // 20 Mbit/s are 2.5 MB/s. A busy machine carries less.
  const double rate = link["values"]["there"]["bytes_per_second"];
  EXPECT_GT(rate, 0);
  EXPECT_LT(rate, 3'000'000);
  char carries[64];
  std::snprintf(carries, sizeof carries, "one connection carries %.3g GB/s;",
                rate / 1e9);
  EXPECT_THAT(std::string(link["advice"]),
              AllOf(HasSubstr("From node 1 ("), HasSubstr("usual is"),
                    HasSubstr(carries)));
  EXPECT_THAT(std::string(checks["nodes"]["found"]), HasSubstr("link 1-2"));
}

TEST_F(DoctorBetweenHosts, ALinkThatIsUnpluggedIsNamed) {
  ASSERT_TRUE(hosts_.unplug(1, 2));
  auto checks = examine();
  const json link = checks["link 1-2"];
  EXPECT_EQ(link["health"], "fail") << link;
  EXPECT_THAT(std::string(link["found"]),
              AllOf(HasSubstr("node 1 ("), HasSubstr("does not reach node 2"),
                    HasSubstr("does not reach node 1")));
  EXPECT_EQ(checks["nodes"]["health"], "fail");
  EXPECT_THAT(std::string(checks["links"]["found"]), HasSubstr("of 3 links"));
}

// As behind a firewall: nothing says that the packets are dropped.
TEST_F(DoctorBetweenHosts, ALinkThatLosesAllPacketsIsNamed) {
  ASSERT_TRUE(hosts_.lose_packets(2, 1));
  auto checks = examine();
  const json link = checks["link 1-2"];
  EXPECT_EQ(link["health"], "fail") << link;
  EXPECT_THAT(std::string(link["found"]), HasSubstr("no answer within 3 s"));
}

TEST_F(DoctorBetweenHosts, DifferentPacketSizesAreNamed) {
  ASSERT_TRUE(hosts_.set_mtu(0, 1, 9000));
  auto checks = examine();
  EXPECT_THAT(std::string(checks["link 0-1"]["advice"]),
              HasSubstr("9000 B from node 0"));
}

}  // namespace
}  // namespace lockstep::internal::testing
