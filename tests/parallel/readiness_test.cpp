#include "lockstep/parallel/ddp/readiness.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

namespace lockstep::internal {
namespace {

using ::testing::ElementsAre;
using Gradient = Readiness::Gradient;

TEST(Readiness, EachParameterIsAwaitedOnce) {
  Readiness readiness(3, /*static_graph=*/false);
  for (int iteration = 0; iteration < 2; ++iteration) {
    readiness.begin();
    EXPECT_EQ(readiness.awaited(), 3U);
    EXPECT_EQ(readiness.count(2), Gradient::ready);
    EXPECT_EQ(readiness.count(2), Gradient::surplus);
    EXPECT_TRUE(readiness.set_unused(1));
    EXPECT_FALSE(readiness.set_unused(1));
    EXPECT_EQ(readiness.count(1), Gradient::surplus);
    EXPECT_EQ(readiness.count(0), Gradient::ready);
    EXPECT_EQ(readiness.awaited(), 0U);
    readiness.end();
    EXPECT_THAT(readiness.last_order(), ElementsAre(2, 0));
  }
}

TEST(Readiness, AStaticGraphLearnsHowOftenEachGradientComes) {
  Readiness readiness(3, /*static_graph=*/true);
  readiness.begin();
  for (size_t parameter : {0, 1, 0}) {
    EXPECT_EQ(readiness.count(parameter), Gradient::awaits_more);
  }
  EXPECT_TRUE(readiness.learns());
  readiness.learn();
  EXPECT_TRUE(readiness.is_unused(2));
  readiness.end();
  EXPECT_THAT(readiness.last_order(), ElementsAre(1, 0));

  readiness.begin();
  EXPECT_TRUE(readiness.is_never_used(2));
  readiness.set_unused(2);
  EXPECT_EQ(readiness.count(0), Gradient::awaits_more);
  EXPECT_EQ(readiness.count(0), Gradient::ready);
  EXPECT_EQ(readiness.count(0), Gradient::surplus);
  EXPECT_EQ(readiness.count(1), Gradient::ready);
  readiness.end();
}

TEST(Readiness, AnIterationThatWasGivenUpTeachesNothing) {
  Readiness readiness(2, /*static_graph=*/true);
  readiness.begin();
  readiness.count(0);
  readiness.give_up();
  EXPECT_TRUE(readiness.learns());
  EXPECT_THAT(readiness.last_order(), ElementsAre());
  readiness.begin();
  EXPECT_EQ(readiness.awaited(), 2U);
}

TEST(Readiness, ExcludedParametersAreNotAwaited) {
  Readiness readiness(2, /*static_graph=*/false);
  readiness.exclude({true, false});
  readiness.begin();
  EXPECT_EQ(readiness.awaited(), 1U);
  EXPECT_EQ(readiness.count(0), Gradient::surplus);
}

TEST(Readiness, WhatDoesNotFitTheStateIsRefused) {
  Readiness readiness(1, /*static_graph=*/false);
  EXPECT_THROW(readiness.count(0), std::logic_error);
  EXPECT_THROW(readiness.set_unused(0), std::logic_error);
  EXPECT_THROW(readiness.end(), std::logic_error);
  readiness.begin();
  EXPECT_THROW(readiness.begin(), std::logic_error);
  EXPECT_THROW(readiness.exclude({true}), std::logic_error);
  EXPECT_THROW(readiness.end(), std::logic_error);  // one gradient is missing
  readiness.count(0);
  readiness.end();
}

}  // namespace
}  // namespace lockstep::internal
