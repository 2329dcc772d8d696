// Tests what the doctors of several nodes tell each other, how they measure a
// link, and what follows from it.
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <set>
#include <thread>

#include "lockstep/cli/doctor/finding.h"
#include "lockstep/cli/doctor/nodes/examine_nodes.h"
#include "lockstep/cli/doctor/nodes/link_listener.h"
#include "lockstep/cli/doctor/nodes/link_probe.h"
#include "lockstep/cli/doctor/nodes/nodes_findings.h"
#include "tests/harness/message_of.h"
#include "tests/launch/memory_agent_store.h"

namespace lockstep::internal::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(LinkPlan, UpToEightNodesEveryLinkIsMeasuredOnce) {
  for (int nodes = 0; nodes <= kMostNodesOfAllLinks; ++nodes) {
    const auto plan = link_plan(nodes);
    const auto links = links_of(plan);
    const std::set<std::pair<int, int>> different(links.begin(), links.end());
    EXPECT_EQ(std::ssize(links), nodes * (nodes - 1) / 2) << nodes;
    EXPECT_EQ(different.size(), links.size()) << nodes;
    EXPECT_LE(std::ssize(plan), nodes) << nodes;
  }
}

TEST(LinkPlan, BeyondEachNodeIsMeasuredWithTheNext) {
  for (const int nodes : {9, 10, 63, 1000}) {
    const auto plan = link_plan(nodes);
    EXPECT_LE(plan.size(), 3u);
    const auto links = links_of(plan);
    ASSERT_EQ(std::ssize(links), nodes);
    const std::set<std::pair<int, int>> different(links.begin(), links.end());
    for (int node = 0; node < nodes; ++node) {
      const int next = (node + 1) % nodes;
      EXPECT_EQ(different.count(std::minmax(node, next)), 1u) << node;
    }
  }
}

TEST(LinkPlan, PartnersAreEachOthers) {
  for (int nodes = 2; nodes < 40; ++nodes) {
    for (const auto& step : link_plan(nodes)) {
      for (int node = 0; node < nodes; ++node) {
        const auto partner = step[static_cast<size_t>(node)];
        if (!partner) continue;
        EXPECT_NE(*partner, node);
        EXPECT_EQ(step[static_cast<size_t>(*partner)], node);
      }
    }
  }
}

NodeRecord record(const std::string& host) {
  return {.id = "id of " + host,
          .host = host,
          .lockstep = "0.1.0",
          .architecture = "x86_64",
          .torch = "2.13.0",
          .cpu_capability = "AVX512",
          .cores = 2,
          .memory_bytes = int64_t{24} << 30,
          .gpus = 0,
          .port = 4711,
          .token = std::string(kLinkTokenBytes, 'a')};
}

TEST(NodeRecord, ComesBackFromItsText) {
  NodeRecord one = record("hosta");
  one.address = "198.18.0.2";
  one.torch.clear();
  one.cores.reset();
  one.troubles = {{"cores", Health::warn, "busy"},
                  {"GPUs", Health::fail, "no driver"}};
  const NodeRecord back = NodeRecord::parse(one.text());
  EXPECT_EQ(back.text(), one.text());
  EXPECT_EQ(back.cores, std::nullopt);
  ASSERT_EQ(back.troubles.size(), 2u);
  EXPECT_EQ(back.troubles[1].health, Health::fail);
}

TEST(NodeRecord, NothingThatAnotherNodeSendsReachesTheTerminalAsItIs) {
  NodeRecord one = record("host\x1b[2J\nroot");
  one.troubles.assign(1000, {"cores", Health::warn, std::string(5000, 'x')});
  EXPECT_LT(one.text().size(), 60'000u);
  std::string text = record("h").text();
  text.replace(text.find("\"h\""), 3,
               "\"\\u001b[2J" + std::string(500, 'y') + "\"");
  const NodeRecord other = NodeRecord::parse(text);
  EXPECT_EQ(other.host.substr(0, 5), " [2Jy");
  EXPECT_EQ(other.host.size(), 200u);
}

TEST(NodeRecord, WhatIsNoRecordIsRefused) {
  const std::string good = record("hosta").text();
  std::string future = good;
  future.replace(future.find("\"format\":1"), 10, "\"format\":2");
  EXPECT_THAT(message_of([&] { NodeRecord::parse(future); }),
              HasSubstr("give all nodes the same Lockstep"));
  for (std::string text :
       {std::string(), std::string("1"), std::string("{}"),
        good.substr(0, good.size() - 1), std::string(50'000, '[')}) {
    EXPECT_THROW(NodeRecord::parse(text), std::runtime_error) << text;
  }
  EXPECT_THROW(LinkFigures::parse("{\"error\":null}"), std::runtime_error);
  EXPECT_THROW(LinkFigures::parse(std::string(50'000, '[')),
               std::runtime_error);
}

// A listener whose answers run in a thread, as another node's.
class Listening : public ::testing::Test {
 protected:
  // Answers node `rank` once it has come.
  void answer(int rank) {
    thread_ = std::thread([this, rank] {
      const Deadline deadline = Deadline::after(seconds(20));
      while (!deadline.expired()) {
        if (auto stream = listener_.take(rank)) {
          answer_link(std::move(*stream));
          return;
        }
        std::this_thread::sleep_for(milliseconds(1));
      }
    });
  }
  void TearDown() override {
    if (thread_.joinable()) thread_.join();
  }
  Endpoint endpoint() const { return {"127.0.0.1", listener_.port()}; }
  FileDescriptor connection() const {
    return connect_to(resolve(endpoint()).front(), seconds(5));
  }
  // Returns whether the listener has closed `stranger`.
  bool is_closed(int stranger) {
    char byte = 0;
    return ::recv(stranger, &byte, 1, MSG_DONTWAIT) == 0 ||
           (errno != EAGAIN && errno != EWOULDBLOCK);
  }

  LinkListener listener_{"127.0.0.1", 4};
  std::thread thread_;
};

TEST_F(Listening, ALinkHasFigures) {
  answer(3);
  const auto figures = measure_link(endpoint(), listener_.token(), 3,
                                    Deadline::after(seconds(20)));
  EXPECT_EQ(figures.error, "");
  EXPECT_GT(figures.connect_us, 0);
  EXPECT_GT(figures.round_trip_us, 0);
  EXPECT_GT(figures.bytes_per_second, 0);
  // It is one clock.
  EXPECT_LE(std::abs(figures.clock_offset_us), figures.clock_error_us);
  EXPECT_GT(figures.mtu.value_or(0), 1000);
  const auto back = LinkFigures::parse(figures.json().dump());
  EXPECT_EQ(back.json(), figures.json());
}

TEST_F(Listening, WithoutTheTokenNothingIsAnswered) {
  auto stranger = connection();
  ASSERT_TRUE(stranger);
  const std::string hello = std::string(kLinkGreeting) +
                            std::string(kLinkTokenBytes, '0') +
                            std::string(kLinkRankBytes - 1, '\0') + '\3';
  ASSERT_EQ(::send(stranger.get(), hello.data(), hello.size(), 0),
            std::ssize(hello));
  const Deadline deadline = Deadline::after(seconds(20));
  while (!is_closed(stranger.get()) && !deadline.expired()) {
    EXPECT_FALSE(listener_.take(3));
  }
  EXPECT_TRUE(is_closed(stranger.get()));
}

TEST_F(Listening, ARankThatTheJobDoesNotHaveIsNotAnswered) {
  const auto figures = std::async(std::launch::async, [this] {
    return measure_link(endpoint(), listener_.token(), 4,
                        Deadline::after(seconds(20)));
  });
  while (figures.wait_for(milliseconds(1)) != std::future_status::ready) {
    EXPECT_FALSE(listener_.take(3));
  }
}

// Strangers that send nothing, or too little, keep no place from a member.
TEST_F(Listening, StrangersAreBounded) {
  std::vector<FileDescriptor> strangers;
  for (int i = 0; i < 40; ++i) {
    strangers.push_back(connection());
    ASSERT_TRUE(strangers.back());
    if (i % 2 == 1) ::send(strangers.back().get(), "lockstep", 8, 0);
    EXPECT_FALSE(listener_.take(3));
  }
  EXPECT_TRUE(is_closed(strangers.front().get()));
  EXPECT_FALSE(is_closed(strangers.back().get()));
  ::send(strangers.back().get(), "GET / HTTP/1.1\r\n", 16, 0);
  const Deadline deadline = Deadline::after(seconds(20));
  while (!is_closed(strangers.back().get()) && !deadline.expired()) {
    listener_.take(3);
  }
  EXPECT_TRUE(is_closed(strangers.back().get()));
  answer(3);
  EXPECT_EQ(measure_link(endpoint(), listener_.token(), 3,
                         Deadline::after(seconds(20)))
                .error,
            "");
}

TEST_F(Listening, AMemberThatComesEarlyIsKept) {
  auto early = std::async(std::launch::async, [this] {
    return measure_link(endpoint(), listener_.token(), 2,
                        Deadline::after(seconds(20)));
  });
  const Deadline deadline = Deadline::after(milliseconds(100));
  while (!deadline.expired()) EXPECT_FALSE(listener_.take(1));
  answer(2);
  EXPECT_EQ(early.get().error, "");
}

TEST_F(Listening, ANodeThatIsNotThereIsAnError) {
  const int port = listener_.port();
  const std::string token = listener_.token();
  listener_ = LinkListener("127.0.0.1", 2);
  EXPECT_EQ(
      measure_link({"127.0.0.1", port}, token, 1, Deadline::after(seconds(20)))
          .error,
      "Connection refused");
  EXPECT_THAT(measure_link({"no.such.host.invalid", port}, token, 1,
                           Deadline::after(seconds(20)))
                  .error,
              HasSubstr("no.such.host.invalid"));
}

// A process that accepts and is silent, as a node that is stopped.
TEST_F(Listening, ASilentNodeIsAnErrorAtTheDeadline) {
  EXPECT_EQ(measure_link(endpoint(), listener_.token(), 1,
                         Deadline::after(milliseconds(50)))
                .error,
            "connected, but no answer came");
}

class Meetings : public ::testing::Test {
 protected:
  struct Node {
    MemoryAgentStore store;
    Meeting meeting;
    Node(std::shared_ptr<StoredKeys> keys, int nodes, const std::string& id)
        : store(std::move(keys)), meeting(store, nodes, id) {}
  };
  std::unique_ptr<Node> node(int nodes, const std::string& id = "") {
    return std::make_unique<Node>(keys_, nodes, id);
  }
  std::shared_ptr<StoredKeys> keys_ = std::make_shared<StoredKeys>();
};

TEST_F(Meetings, NodesTakeTheRanksThatAreFree) {
  auto one = node(3), two = node(3), three = node(3);
  EXPECT_EQ(one->meeting.join(1, record("b")), 1);
  EXPECT_EQ(two->meeting.join(std::nullopt, record("a")), 0);
  EXPECT_THAT(one->meeting.absent(), ElementsAre(2));
  EXPECT_FALSE(one->meeting.await_all(Deadline::after(milliseconds(0))));
  EXPECT_EQ(three->meeting.join(std::nullopt, record("c")), 2);
  for (auto* each : {&one, &two, &three}) {
    EXPECT_THAT(
        (*each)->meeting.await_members(Deadline::after(milliseconds(0))),
        ElementsAre(0, 1, 2));
    EXPECT_EQ((*each)->meeting.record_of(2).host, "c");
  }
}

TEST_F(Meetings, NodesThatDifferAreRefused) {
  node(2)->meeting.join(1, record("a"));
  EXPECT_THAT(message_of([&] { node(3)->meeting.join(0, record("b")); }),
              AllOf(HasSubstr("--nnodes is 3 here (b) and 2 on a")));
  EXPECT_THAT(
      message_of([&] { node(2, "night")->meeting.join(0, record("b")); }),
      HasSubstr("--rdzv-id is \"night\" here (b) and \"\" on a"));
  EXPECT_THAT(message_of([&] { node(2)->meeting.join(1, record("b")); }),
              HasSubstr("two nodes have --node-rank=1: this one (b) and a"));
  node(2)->meeting.join(std::nullopt, record("c"));
  EXPECT_THAT(
      message_of([&] { node(2)->meeting.join(std::nullopt, record("d")); }),
      HasSubstr("all 2 nodes of --nnodes have come already"));
}

// A bug: such a run id ended the examination.
TEST_F(Meetings, ARunIdThatIsNotUtf8IsCompared) {
  const std::string id = "caf\xe9";
  node(2, id)->meeting.join(1, record("a"));
  EXPECT_EQ(node(2, id)->meeting.join(0, record("b")), 0);
}

TEST_F(Meetings, TheDeadlineBeginsWithoutTheAbsent) {
  auto one = node(3), two = node(3), late = node(3);
  one->meeting.join(0, record("a"));
  two->meeting.join(2, record("c"));
  EXPECT_THAT(one->meeting.await_members(Deadline::after(milliseconds(0))),
              ElementsAre(0, 2));
  EXPECT_THAT(two->meeting.await_members(Deadline::after(seconds(20))),
              ElementsAre(0, 2));
  late->meeting.join(1, record("b"));
  EXPECT_THAT(message_of([&] {
                late->meeting.await_members(Deadline::after(seconds(20)));
              }),
              HasSubstr("came too late"));
  one->meeting.tell_verdict("well");
  EXPECT_EQ(two->meeting.await_verdict(Deadline::after(seconds(20))), "well");
  EXPECT_THROW(node(3)->meeting.join(1, record("b")), MeetingOver);
}

TEST_F(Meetings, WhatOthersWroteIsNotBelieved) {
  auto one = node(2);
  one->meeting.join(0, record("a"));
  keys_->values["doctor/node/1"] = "[]";
  EXPECT_THAT(message_of([&] { one->meeting.record_of(1); }),
              HasSubstr("node 1: its record"));
  for (const char* members : {"0,0", "1,0", "7", "x", "0;1", "-1"}) {
    keys_->values["doctor/members"] = members;
    EXPECT_THROW(one->meeting.await_members(Deadline::after(seconds(1))),
                 std::runtime_error)
        << members;
  }
}

class NodesFindings : public ::testing::Test {
 protected:
  NodesFindings() {
    for (int rank = 0; rank < 3; ++rank) {
      found_.records[rank] = record(std::string("host") + "abc"[rank]);
      for (int other = 0; other < 3; ++other) {
        if (rank == other) continue;
        if (rank < other) found_.links.emplace_back(rank, other);
        found_.ways[{rank, other}] = {.connect_us = 60,
                                      .round_trip_us = 50,
                                      .clock_offset_us = 0,
                                      .clock_error_us = 30,
                                      .bytes_per_second = 1'000'000'000,
                                      .mtu = 1500};
      }
    }
  }

  // Returns the findings by name.
  std::map<std::string, Finding> findings() const {
    std::map<std::string, Finding> named;
    const auto all = nodes_findings(found_);
    for (const auto& finding : all) named[finding.name] = finding;
    named["nodes"] = nodes_verdict(found_, all);
    return named;
  }
  LinkFigures& way(int from, int to) { return found_.ways.at({from, to}); }

  NodesFound found_{.nodes = 3};
};

TEST_F(NodesFindings, IfAllIsWellThereIsALinePerNodeAndOneForTheLinks) {
  const auto all = findings();
  EXPECT_EQ(all.size(), 5u);
  EXPECT_EQ(all.at("node 1").found,
            "hostb: x86_64, 2 cores, 24.0 GiB, Lockstep 0.1.0, LibTorch "
            "2.13.0");
  EXPECT_EQ(all.at("links").found,
            "3 of 3 links are well; usual are 50 us for a round trip and 1 "
            "GB/s for one connection");
  EXPECT_EQ(all.at("nodes").found, "3 nodes and 3 links: all are well");
  for (const auto& [name, finding] : all) {
    EXPECT_EQ(finding.health, Health::ok) << name;
    EXPECT_EQ(finding.advice, "") << name;
  }
}

TEST_F(NodesFindings, AnAbsentNodeIsNamed) {
  found_.records.erase(1);
  found_.links = {{0, 2}};
  const auto all = findings();
  EXPECT_EQ(all.at("node 1").health, Health::fail);
  EXPECT_EQ(all.at("node 1").found, "absent");
  EXPECT_EQ(all.at("nodes").health, Health::fail);
  EXPECT_EQ(all.at("nodes").found, "3 nodes and 1 link; fail: node 1");
  EXPECT_EQ(all.at("nodes").advice, "Node 0 (hosta) shows what was found.");
}

TEST_F(NodesFindings, ALinkThatIsCutNamesBothHostsAndBothWays) {
  way(1, 2) = {.error = "no answer within 3 s"};
  auto link = findings().at("link 1-2");
  EXPECT_EQ(link.health, Health::fail);
  EXPECT_EQ(link.found,
            "node 1 (hostb) does not reach node 2 (hostc): no answer within 3 "
            "s; the other way is open");
  way(2, 1) = {.error = "Connection refused"};
  link = findings().at("link 1-2");
  EXPECT_THAT(link.found, HasSubstr("3 s; node 2 (hostc) does not reach node 1 "
                                    "(hostb): Connection refused"));
  EXPECT_THAT(link.advice, HasSubstr("firewall"));
  EXPECT_EQ(link.values["back"]["error"], "Connection refused");
  found_.ways.erase({1, 2});
  way(2, 1).error.clear();
  EXPECT_THAT(findings().at("link 1-2").found,
              HasSubstr("has not told what it found"));
  EXPECT_THAT(findings().at("links").found, HasSubstr("2 of 3 links"));
}

// Four of six ways are slow, so that the median would call them usual.
TEST_F(NodesFindings, AHostWithASlowCardIsSlowOnAllItsLinks) {
  for (const int other : {0, 1}) {
    way(2, other).bytes_per_second = way(other, 2).bytes_per_second =
        300'000'000;
  }
  const auto all = findings();
  for (const char* name : {"link 0-2", "link 1-2"}) {
    ASSERT_EQ(all.count(name), 1u);
    EXPECT_EQ(all.at(name).health, Health::warn);
    EXPECT_THAT(all.at(name).found, HasSubstr("(hostc)"));
    EXPECT_THAT(all.at(name).advice,
                AllOf(HasSubstr("carries 0.3 GB/s; usual is 1 GB/s between "
                                "these nodes"),
                      HasSubstr("ethtool")));
  }
  EXPECT_EQ(all.count("link 0-1"), 0u);
  EXPECT_EQ(all.at("nodes").found,
            "3 nodes and 3 links; warn: link 0-2, link 1-2");
}

TEST_F(NodesFindings, IfAllLinksAreSlowTheyAreComparedWithOthers) {
  for (auto& [ends, figures] : found_.ways) {
    figures.bytes_per_second = 50'000'000;
    figures.round_trip_us = 30'000;
  }
  const auto link = findings().at("link 0-1");
  EXPECT_THAT(link.advice,
              AllOf(HasSubstr("a round trip takes 30 ms; usual is less than "
                              "0.5 ms within a data centre"),
                    HasSubstr("0.05 GB/s; usual is more than 0.1 GB/s")));
  EXPECT_EQ(findings().count("links"), 0u);
}

TEST_F(NodesFindings, AFarNodeIsAWarningAndNoiseIsNot) {
  way(0, 1).round_trip_us = 900;
  EXPECT_EQ(findings().at("link 0-1").health, Health::warn);
  way(0, 1).round_trip_us = 400;
  EXPECT_EQ(findings().count("link 0-1"), 0u);
}

TEST_F(NodesFindings, PacketsThatAreLostAboveASizeAreAFailure) {
  way(0, 1).bytes_per_second = 0;
  const auto link = findings().at("link 0-1");
  EXPECT_EQ(link.health, Health::fail);
  EXPECT_THAT(link.advice, HasSubstr("From node 0 (hosta) to node 1 (hostb) "
                                     "single bytes go through"));
}

TEST_F(NodesFindings, DifferentPacketSizesAreAWarning) {
  way(0, 1).mtu = 9000;
  EXPECT_THAT(findings().at("link 0-1").advice,
              HasSubstr("9000 B from node 0 (hosta) and 1500 B from node 1"));
}

TEST_F(NodesFindings, AClockIsComparedAlongTheLinks) {
  // Node 1 is 5 s ahead, node 2 as node 0; there is no link from 0 to 1.
  found_.ways.erase({0, 1});
  found_.ways.erase({1, 0});
  way(1, 2).clock_offset_us = -5'000'000;
  way(2, 1).clock_offset_us = 5'000'000;
  const auto all = findings();
  EXPECT_THAT(all.at("node 1").advice,
              HasSubstr("Its clock is 5 s ahead of that of node 0 (hosta)"));
  EXPECT_EQ(all.at("node 1").values["clock_ahead_us"], 5'000'000);
  EXPECT_EQ(all.at("node 1").health, Health::warn);
  EXPECT_EQ(all.at("node 2").health, Health::ok);
  // On a slow link the difference is not known well enough.
  for (auto& [ends, figures] : found_.ways) figures.clock_error_us = 3'000'000;
  EXPECT_EQ(findings().at("node 1").health, Health::ok);
}

TEST_F(NodesFindings, TheOddNodeIsTheOneThatDiffers) {
  found_.records[0].torch = "2.12.0";
  found_.records[1].architecture = "aarch64";
  found_.records[2].cpu_capability = "AVX2";
  found_.records[2].lockstep = "0.2.0";
  const auto all = findings();
  EXPECT_EQ(all.at("node 0").health, Health::fail);
  EXPECT_THAT(all.at("node 0").advice,
              HasSubstr("LibTorch 2.12.0 here, 2.13.0 elsewhere"));
  EXPECT_THAT(all.at("node 1").advice,
              AllOf(HasSubstr("aarch64 here, x86_64 elsewhere"),
                    Not(HasSubstr("LibTorch"))));
  EXPECT_THAT(all.at("node 2").advice,
              AllOf(HasSubstr("Lockstep 0.2.0 here"),
                    HasSubstr("CPU capability AVX2 here")));
  // A node that does not know its LibTorch does not differ.
  found_.records[0].torch.clear();
  EXPECT_EQ(findings().at("node 0").health, Health::ok);
}

TEST_F(NodesFindings, WhatAHostFoundItselfCounts) {
  found_.records[1].troubles = {{"cores", Health::warn, "busy"},
                                {"GPUs", Health::fail, "no driver"}};
  const auto node = findings().at("node 1");
  EXPECT_EQ(node.health, Health::fail);
  EXPECT_EQ(node.advice,
            "Its own checks fail: GPUs (no driver). Its screen says what to "
            "do. Its own checks warn: cores. Its screen says what to "
            "do.");
}

}  // namespace
}  // namespace lockstep::internal::testing
