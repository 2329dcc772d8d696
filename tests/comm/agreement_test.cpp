#include "lockstep/comm/agreement.h"

#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr AgreementOptions kWays[] = {
    {.way = AgreementWay::collectives},
    {.way = AgreementWay::store},
    {.way = AgreementWay::store_before_error}};

WORLD_TEST(Agreement, RanksThatHoldTheSameAgree, 1, 2, 3) {
  auto group = init_process_group();
  for (const auto& way : kWays) {
    Agreement agreement(group, way);
    agreement.hold("dtype", "Float");
    agreement.hold("shape", "[2, 3]");
    EXPECT_FALSE(agreement.compare());
  }
}

WORLD_TEST(Agreement, TheFirstRankAndItemThatDifferAreNamedOnAllRanks, 2, 3) {
  auto group = init_process_group();
  for (const auto& way : kWays) {
    Agreement agreement(group, way);
    agreement.hold("dtype", "Float");
    agreement.hold("shape", world.rank == 1 ? "[2]" : "[2, 3]");
    agreement.hold("layout", std::to_string(world.rank));
    const auto found = agreement.compare();
    ASSERT_TRUE(found);
    EXPECT_EQ(found->name, "shape");
    EXPECT_EQ(found->words(),
              "the ranks of the group differ in shape: [2, 3] on rank 0, [2] "
              "on rank 1");
  }
}

// The bytes of an agreement were read as the name of a call, and the other way
// round.
WORLD_TEST(Agreement, ARankInAnotherCallIsNamed, 2) {
  auto group = init_process_group();
  if (world.rank == 0) {
    Agreement agreement(group, {.way = AgreementWay::store});
    agreement.hold("stage", "one");
    EXPECT_THAT(
        [&] { agreement.compare(); },
        ThrowsMessage<Disagreement>("a comparison between ranks: rank 1 called "
                                    "monitored_barrier instead"));
  } else {
    EXPECT_THAT(message_of([] { monitored_barrier(); }),
                HasSubstr("rank 0 called a comparison between ranks instead"));
  }
}

WORLD_TEST(Agreement, NamesAndTextsDoNotRunIntoEachOther, 2) {
  auto group = init_process_group();
  Agreement agreement(group);
  agreement.hold(world.rank == 0 ? "ab" : "a", world.rank == 0 ? "c" : "bc");
  EXPECT_EQ(agreement.compare()->words(),
            "the ranks of the group differ in item 0: ab c on rank 0, a bc on "
            "rank 1");
}

WORLD_TEST(Agreement, WhatOneRankLacksIsNamed, 2) {
  auto group = init_process_group();
  for (const int has : {0, 1}) {
    Agreement agreement(group);
    agreement.hold("a", "1");
    if (world.rank == has) agreement.hold("b", "2");
    EXPECT_EQ(agreement.compare()->words(),
              has == 0 ? "the ranks of the group differ in b: 2 on rank 0, "
                         "nothing on rank 1"
                       : "the ranks of the group differ in b: nothing on rank "
                         "0, 2 on rank 1");
  }
}

// As the shapes of a tied weight, which some stages of a pipeline have.
WORLD_TEST(Agreement, ARankWithoutATextIsNotCompared, 3) {
  auto group = init_process_group();
  for (const auto& way : kWays) {
    Agreement same(group, way);
    same.hold("weight", world.rank == 0 ? "" : "[2]");
    EXPECT_FALSE(same.compare());
    Agreement different(group, way);
    different.hold("weight", world.rank == 0   ? ""
                             : world.rank == 1 ? "[2]"
                                               : "[3]");
    EXPECT_EQ(different.compare()->words(),
              "the ranks of the group differ in weight: [2] on rank 1, [3] on "
              "rank 2");
  }
}

// As a rank of Python beside ranks of Lockstep whose models differ.
WORLD_TEST(Agreement, BeforeAnErrorARankThatDoesNotComeIsNotCompared, 3) {
  auto group = init_process_group();
  barrier();
  if (world.rank > 0) {
    Agreement agreement(group, {.way = AgreementWay::store_before_error,
                                .timeout = std::chrono::seconds(2)});
    agreement.hold("weight", world.rank == 1 ? "[2]" : "[3]");
    EXPECT_EQ(agreement.compare()->words(),
              "the ranks of the group differ in weight: [2] on rank 1, [3] on "
              "rank 2");
  }
  barrier();
}

WORLD_TEST(Agreement, AFailureOfOneRankEndsAll, 1, 2, 3) {
  auto group = init_process_group();
  const int last = world.size - 1;
  const bool fails = world.rank == last;
  const std::string prefix = fails ? "" : c10::str("rank ", last, ": ");
  for (const auto& way : kWays) {
    const auto agree = [&](const std::exception_ptr& failure) {
      Agreement agreement(group, way);
      agreement.hold("number", std::to_string(world.rank));
      if (fails) agreement.fail(failure);
      agreement.compare();
    };
    EXPECT_THAT(
        [&] {
          agree(std::make_exception_ptr(std::invalid_argument("no model")));
        },
        ThrowsMessage<std::invalid_argument>(prefix + "no model"));
    EXPECT_THAT(
        [&] { agree(std::make_exception_ptr(std::runtime_error("no disk"))); },
        ThrowsMessage<std::runtime_error>(prefix + "no disk"));
  }
}

WORLD_TEST(Agreement, NumbersTravelWithTheComparison, 1, 2, 3) {
  auto group = init_process_group();
  for (const bool differ : {false, true}) {
    Agreement agreement(group);
    agreement.hold("name", differ ? std::to_string(world.rank) : "same");
    agreement.tell({10 * world.rank, -1});
    EXPECT_EQ(agreement.compare().has_value(), differ && world.size > 1);
    ASSERT_EQ(agreement.told().size(), world.size);
    for (int rank = 0; rank < world.size; ++rank) {
      EXPECT_THAT(agreement.told()[rank], ElementsAre(10 * rank, -1));
    }
  }
}

// Ranks that agree exchange no texts, and is_same() never does.
WORLD_TEST(Agreement, ItCostsOneCollective, 2) {
  auto group = init_process_group();
  const auto before = inside(group).next_sequence_number();
  Agreement agreement(group);
  agreement.hold("long", std::string(100'000, 'x'));
  EXPECT_FALSE(agreement.compare());
  EXPECT_EQ(inside(group).next_sequence_number(), before + 2);
  Agreement different(group);
  different.hold("rank", std::to_string(world.rank));
  EXPECT_FALSE(different.is_same());
  EXPECT_EQ(inside(group).next_sequence_number(), before + 4);
}

WORLD_TEST(Agreement, ItIsAmongTheRanksOfItsGroup, 3) {
  auto group = init_process_group();
  const auto pair = new_group({0, 2});
  if (world.rank == 1) return;
  Agreement agreement(pair);
  agreement.hold("rank", std::to_string(world.rank));
  const auto found = agreement.compare();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->first_rank, 0);
  EXPECT_EQ(found->rank, 2);
}

}  // namespace
}  // namespace lockstep::internal
