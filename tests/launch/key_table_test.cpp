#include "lockstep/launch/nodes/store/key_table.h"

#include <gmock/gmock.h>

#include <limits>

namespace lockstep::internal::testing {
namespace {

using Operation = Request::Operation;

class KeyTableTest : public ::testing::Test {
 protected:
  Reply set(const std::string& key, const std::string& value) {
    return table_.apply(
        {.operation = Operation::set, .key = key, .value = value});
  }
  std::string get(const std::string& key) {
    return table_.apply({.operation = Operation::get, .key = key}).text;
  }
  std::string set_if_absent(const std::string& key, const std::string& value) {
    return table_
        .apply(
            {.operation = Operation::set_if_absent, .key = key, .value = value})
        .text;
  }
  int64_t add(const std::string& key, int64_t amount) {
    return table_
        .apply({.operation = Operation::add, .key = key, .number = amount})
        .number;
  }
  void remove(const std::string& key) {
    table_.apply({.operation = Operation::remove, .key = key});
  }

  KeyTable table_{4000};
};

TEST_F(KeyTableTest, ValuesAndCountersAreKept) {
  EXPECT_EQ(get("a"), "");
  set("a", "1");
  set("a", "2");
  EXPECT_EQ(get("a"), "2");
  EXPECT_EQ(set_if_absent("a", "3"), "2");
  remove("a");
  EXPECT_EQ(get("a"), "");
  EXPECT_EQ(set_if_absent("a", "3"), "3");
  EXPECT_EQ(add("a", 0), 0);
  EXPECT_EQ(add("a", 5), 5);
  EXPECT_EQ(add("a", -2), 3);
  EXPECT_EQ(get("a"), "3") << "a counter is not a value";
  add("most", std::numeric_limits<int64_t>::max());
  EXPECT_EQ(add("most", 1), std::numeric_limits<int64_t>::min());
}

TEST_F(KeyTableTest, EachChangeHasANumberAndNothingElseHas) {
  EXPECT_EQ(table_.last_change_of("a"), 0);
  set("a", "1");
  add("n", 1);
  EXPECT_EQ(table_.last_change_of("a"), 1);
  EXPECT_EQ(table_.last_change_of("n"), 2);
  get("a");
  add("n", 0);
  add("new", 0);
  remove("never set");
  set_if_absent("a", "2");
  EXPECT_EQ(table_.last_change(), 2);
  remove("a");
  EXPECT_EQ(table_.last_change_of("a"), 3) << "removed keys are remembered";
}

TEST_F(KeyTableTest, WhatHasNoRoomIsRefusedAndChangesNothing) {
  const std::string large(1500, 'x');
  EXPECT_EQ(set("a", large).kind, Reply::Kind::done);
  EXPECT_EQ(set("b", large).kind, Reply::Kind::done);
  const int64_t changes = table_.last_change();
  EXPECT_EQ(set("c", large).kind, Reply::Kind::refused);
  EXPECT_EQ(get("c"), "");
  EXPECT_EQ(table_.last_change(), changes);
  // Entries that are replaced or removed make room.
  EXPECT_EQ(set("b", large).kind, Reply::Kind::done);
  remove("a");
  EXPECT_EQ(set("c", large).kind, Reply::Kind::done);
  int keys = 0;
  while (add("counter " + std::to_string(keys), 1) == 1) {
    ASSERT_LT(++keys, 100) << "counters take room, too";
  }
}

TEST_F(KeyTableTest, EmptyValueIsRefused) {
  EXPECT_EQ(set("a", "").kind, Reply::Kind::refused);
  EXPECT_EQ(
      table_.apply({.operation = Operation::set_if_absent, .key = "a"}).kind,
      Reply::Kind::refused);
}

}  // namespace
}  // namespace lockstep::internal::testing
