// The keys of the workers' store: what each operation does, as in c10d's
// TCPStore, and which waits it ends.
#include "lockstep/launch/nodes/store/worker_table.h"

#include <gmock/gmock.h>

#include <limits>

namespace lockstep::internal::testing {
namespace {

using Kind = WorkerReply::Kind;
using Operation = WorkerCall::Operation;
using Asker = WorkerTable::Asker;

constexpr Asker kFirst{1, 1};
constexpr Asker kSecond{1, 2};
constexpr Asker kElsewhere{2, 1};

class WorkerTableTest : public ::testing::Test {
 protected:
  // Returns the only reply, which is to the asker.
  WorkerReply ask(const WorkerCall& call, Asker asker = kFirst) {
    const auto answers = table_.ask(asker, call);
    EXPECT_EQ(answers.size(), 1u);
    if (answers.empty()) return {};
    EXPECT_EQ(answers.front().to, asker);
    return answers.front().reply;
  }
  WorkerReply set(const std::string& key, const std::string& value) {
    return ask({.operation = Operation::set, .key = key, .value = value});
  }
  WorkerReply get(const std::string& key) {
    return ask({.operation = Operation::get, .key = key});
  }
  WorkerReply add(const std::string& key, int64_t amount) {
    return ask({.operation = Operation::add, .key = key, .number = amount});
  }
  std::string compare_set(const std::string& key, const std::string& expected,
                          const std::string& value) {
    return ask({.operation = Operation::compare_set,
                .key = key,
                .value = value,
                .expected = expected})
        .text;
  }
  size_t replies_to_wait(const Asker& asker, std::vector<std::string> keys) {
    return table_
        .ask(asker, {.operation = Operation::wait, .keys = std::move(keys)})
        .size();
  }
  WorkerReply claim(const Asker& asker, const std::string& name) {
    return ask({.operation = Operation::claim, .key = "place", .value = name},
               asker);
  }

  WorkerTable table_{40'000};
};

TEST_F(WorkerTableTest, KeysAreAsInTcpStore) {
  EXPECT_EQ(get("a").kind, Kind::absent);
  EXPECT_EQ(set("a", "1").kind, Kind::done);
  EXPECT_EQ(get("a"), (WorkerReply{.kind = Kind::value, .text = "1"}));
  EXPECT_EQ(set("empty", "").kind, Kind::done);
  EXPECT_EQ(get("empty"), (WorkerReply{.kind = Kind::value}))
      << "an empty value is a value";
  EXPECT_EQ(add("a", 41).number, 42);
  EXPECT_EQ(get("a").text, "42") << "a counter is a value";
  EXPECT_EQ(add("new", 0).number, 0);
  EXPECT_EQ(get("new").text, "0");
  EXPECT_EQ(add("empty", 1).kind, Kind::refused);
  set("word", "1x");
  EXPECT_EQ(add("word", 1).kind, Kind::refused);
  add("most", std::numeric_limits<int64_t>::max());
  EXPECT_EQ(add("most", 1).number, std::numeric_limits<int64_t>::min());
  EXPECT_EQ(ask({.operation = Operation::count_keys}).number, 5);
  EXPECT_EQ(ask({.operation = Operation::remove, .key = "a"}).number, 1);
  EXPECT_EQ(ask({.operation = Operation::remove, .key = "a"}).number, 0);
  EXPECT_EQ(get("a").kind, Kind::absent);
  EXPECT_EQ(
      ask({.operation = Operation::append, .key = "a", .value = "xy"}).number,
      2);
  EXPECT_EQ(
      ask({.operation = Operation::append, .key = "a", .value = "z"}).number,
      3);
  EXPECT_EQ(get("a").text, "xyz");
  const auto check = [&](std::vector<std::string> keys) {
    return ask({.operation = Operation::check, .keys = std::move(keys)}).kind;
  };
  EXPECT_EQ(check({}), Kind::done);
  EXPECT_EQ(check({"a", "empty"}), Kind::done);
  EXPECT_EQ(check({"a", "none"}), Kind::absent);
}

TEST_F(WorkerTableTest, CompareSetIsThatOfTcpStore) {
  EXPECT_EQ(compare_set("a", "old", "new"), "old") << "there is no old value";
  EXPECT_EQ(get("a").kind, Kind::absent);
  EXPECT_EQ(compare_set("a", "", "first"), "first");
  EXPECT_EQ(compare_set("a", "", "second"), "first");
  EXPECT_EQ(compare_set("a", "first", "second"), "second");
  EXPECT_EQ(get("a").text, "second");
}

TEST_F(WorkerTableTest, WaitEndsWhenTheLastKeyComes) {
  set("there", "1");
  EXPECT_EQ(replies_to_wait(kFirst, {"there"}), 1u);
  EXPECT_EQ(replies_to_wait(kFirst, {"there", "a", "b", "a"}), 0u);
  EXPECT_EQ(replies_to_wait(kElsewhere, {"b"}), 0u);
  EXPECT_EQ(
      table_.ask(kSecond, {.operation = Operation::set, .key = "a"}).size(),
      1u);
  // Each way to make a key ends waits.
  const auto answers = table_.ask(
      kSecond, {.operation = Operation::add, .key = "b", .number = 1});
  ASSERT_EQ(answers.size(), 3u);
  EXPECT_EQ(answers[0].to, kSecond);
  EXPECT_EQ(answers[1].to, kFirst);
  EXPECT_EQ(answers[1].reply, WorkerReply{});
  EXPECT_EQ(answers[2].to, kElsewhere);
  for (const auto operation :
       {Operation::compare_set, Operation::append, Operation::set}) {
    ask({.operation = Operation::remove, .key = "a"}, kSecond);
    EXPECT_EQ(replies_to_wait(kFirst, {"a"}), 0u);
    EXPECT_EQ(table_.ask(kSecond, {.operation = operation, .key = "a"}).size(),
              2u);
  }
}

TEST_F(WorkerTableTest, NextCallEndsAWaitAndIsAnsweredAfterIt) {
  replies_to_wait(kFirst, {"a"});
  const auto answers = table_.ask(kFirst, {.operation = Operation::get});
  ASSERT_EQ(answers.size(), 2u);
  EXPECT_EQ(answers[0].reply.kind, Kind::ended);
  EXPECT_EQ(answers[1].reply.kind, Kind::absent);
  EXPECT_EQ(set("a", "1").kind, Kind::done) << "nothing waits any more";
  // It may make the key itself.
  replies_to_wait(kFirst, {"b"});
  EXPECT_EQ(
      table_.ask(kFirst, {.operation = Operation::set, .key = "b"}).size(), 2u);
}

TEST_F(WorkerTableTest, ForgottenAskersWaitForNothing) {
  replies_to_wait(kFirst, {"a"});
  replies_to_wait(kSecond, {"a"});
  replies_to_wait(kElsewhere, {"a"});
  table_.forget(kFirst);
  table_.forget(kFirst);
  table_.forget_relay(kElsewhere.relay);
  const auto answers =
      table_.ask(kFirst, {.operation = Operation::set, .key = "a"});
  ASSERT_EQ(answers.size(), 2u);
  EXPECT_EQ(answers[1].to, kSecond);
}

TEST_F(WorkerTableTest, PlaceIsTakenByOneNameUntilItsConnectionIsClosed) {
  EXPECT_EQ(claim(kFirst, "one"),
            (WorkerReply{.kind = Kind::number, .number = 1}));
  EXPECT_EQ(claim(kElsewhere, "two"),
            (WorkerReply{.kind = Kind::refused, .text = "one", .number = 1}));
  // The same process again, by another connection. The end of the first one
  // does not free the place then.
  EXPECT_EQ(claim(kSecond, "one").number, 2);
  table_.forget(kFirst);
  EXPECT_EQ(claim(kElsewhere, "two").kind, Kind::refused);
  table_.forget_relay(kSecond.relay);
  EXPECT_EQ(claim(kElsewhere, "two").number, 3);
}

TEST_F(WorkerTableTest, WhatHasNoRoomIsRefusedAndChangesNothing) {
  const std::string large(15'000, 'x');
  EXPECT_EQ(set("a", large).kind, Kind::done);
  EXPECT_EQ(set("b", large).kind, Kind::done);
  EXPECT_EQ(set("c", large).kind, Kind::refused);
  EXPECT_EQ(get("c").kind, Kind::absent);
  EXPECT_EQ(
      ask({.operation = Operation::append, .key = "a", .value = large}).kind,
      Kind::refused);
  EXPECT_EQ(get("a").text, large);
  // Entries that are replaced or removed make room.
  EXPECT_EQ(set("b", large).kind, Kind::done);
  EXPECT_EQ(ask({.operation = Operation::remove, .key = "a"}).number, 1);
  EXPECT_EQ(set("c", large).kind, Kind::done);
  int keys = 0;
  while (add("counter " + std::to_string(keys), 1).kind == Kind::number) {
    ASSERT_LT(++keys, 1000) << "counters take room, too";
  }
  int places = 0;
  while (ask({.operation = Operation::claim,
              .key = std::to_string(places),
              .value = "me"})
             .kind == Kind::number) {
    ASSERT_LT(++places, 1000) << "places take room, too";
  }
}

// A bug: waits cost nothing, and a hundred connections that waited for many
// keys each took 827 MB.
TEST_F(WorkerTableTest, WaitsTakeRoomAndGiveItBack) {
  std::vector<std::string> many;
  for (int key = 0; key < 100; ++key) many.push_back(std::to_string(key));
  const auto wait = [&](const Asker& asker) {
    return table_.ask(asker, {.operation = Operation::wait, .keys = many});
  };
  for (int turn = 0; turn < 3; ++turn) {
    EXPECT_TRUE(wait(kFirst).empty());
    const auto refused = wait(kSecond);
    ASSERT_EQ(refused.size(), 1u);
    EXPECT_EQ(refused[0].to, kSecond);
    EXPECT_EQ(refused[0].reply.kind, Kind::refused);
    table_.forget(kFirst);
    EXPECT_EQ(set("large", std::string(30'000, 'x')).kind, Kind::done);
    ask({.operation = Operation::remove, .key = "large"});
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
