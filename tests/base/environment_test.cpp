#include "lockstep/base/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

namespace lockstep::internal {
namespace {

TEST(Environment, UnsetAndEmptyAreAlike) {
  ::unsetenv("LOCKSTEP_TEST_VARIABLE");
  EXPECT_EQ(get_env("LOCKSTEP_TEST_VARIABLE"), std::nullopt);
  ::setenv("LOCKSTEP_TEST_VARIABLE", "", 1);
  EXPECT_EQ(get_env("LOCKSTEP_TEST_VARIABLE"), std::nullopt);
  ::setenv("LOCKSTEP_TEST_VARIABLE", "a", 1);
  EXPECT_EQ(get_env("LOCKSTEP_TEST_VARIABLE"), "a");
  ::unsetenv("LOCKSTEP_TEST_VARIABLE");
}

TEST(Environment, NumberOutOfRangeNamesVariableValueAndRange) {
  ::setenv("LOCKSTEP_TEST_VARIABLE", "70000", 1);
  try {
    get_env_int("LOCKSTEP_TEST_VARIABLE", 0, 65535);
    FAIL() << "70000 was accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(),
                testing::AllOf(testing::HasSubstr("LOCKSTEP_TEST_VARIABLE"),
                               testing::HasSubstr("70000"),
                               testing::HasSubstr("from 0 to 65535")));
  }
  ::unsetenv("LOCKSTEP_TEST_VARIABLE");
}

TEST(Environment, ParseIntTakesAllOfTheText) {
  EXPECT_EQ(parse_int("it", "-3", -10, 10), -3);
  for (const char* text :
       {"", " 3", "3 ", "3x", "0x3", "3.0", "three", "99999999999999999999"}) {
    EXPECT_THROW(parse_int("it", text, -10, 10), std::invalid_argument) << text;
  }
}

TEST(RandomDigits, AreAsManyAsAskedForAndNeverTheSame) {
  EXPECT_EQ(random_digits(0), "");
  EXPECT_THAT(random_digits(512), testing::MatchesRegex("[0-9a-f]{512}"));
  EXPECT_NE(random_digits(32), random_digits(32));
}

TEST(Stripped, OnlyWhatIsAroundTheTextGoes) {
  EXPECT_EQ(stripped(" \t a b\r\n"), "a b");
  EXPECT_EQ(stripped("a"), "a");
  EXPECT_EQ(stripped(" \n"), "");
}

TEST(SameSecret, EveryCharacterAndTheLengthCount) {
  EXPECT_TRUE(is_same_secret("", ""));
  EXPECT_TRUE(is_same_secret("secret", "secret"));
  for (const char* other : {"", "secre", "secrets", "Secret", "secreT"}) {
    EXPECT_FALSE(is_same_secret("secret", other)) << other;
  }
}

// Returns what `look` returns in a child that is forked now.
template <class Look>
bool in_child(const Look& look) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(look() ? 1 : 0);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WEXITSTATUS(status) == 1;
}

TEST(ProcessMark, IsForeignInEveryChildThatWasForkedLater) {
  const ProcessMark mark;
  EXPECT_FALSE(mark.is_foreign());
  EXPECT_TRUE(in_child([&] { return mark.is_foreign(); }));
  EXPECT_TRUE(
      in_child([&] { return in_child([&] { return mark.is_foreign(); }); }));
  EXPECT_FALSE(in_child([] { return ProcessMark().is_foreign(); }));
  EXPECT_FALSE(mark.is_foreign());
}

}  // namespace
}  // namespace lockstep::internal
