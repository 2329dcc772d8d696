#include "lockstep/state/strict_json.h"

#include <gmock/gmock.h>

#include "tests/harness/message_of.h"

namespace lockstep::internal::testing {
namespace {

using ::testing::HasSubstr;

TEST(StrictJson, AnObjectOfManyObjectsIsReadInOnePass) {
  // With a look at all members for each one this would take hours.
  std::string text = "{";
  for (int i = 0; i < 300'000; ++i) {
    text += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":{\"shape\":[1]}";
  }
  const nlohmann::json read = parse_strict_json(text + "}", 3);
  EXPECT_EQ(read.size(), 300'000u);
  EXPECT_EQ(read.at("123456").at("shape").at(0), 1);
}

TEST(StrictJson, IsWhatTheLibraryReads) {
  for (const char* text :
       {"{}", "[]", "1", "-1", "1.5", "1e300", "\"a\"", "null", "true",
        R"({"a": [1, -2, 3.5, null, {"b": {}, "c": []}], "d": {"a": "ü\n"}})",
        "18446744073709551615"}) {
    EXPECT_EQ(parse_strict_json(text, 9), nlohmann::json::parse(text)) << text;
  }
}

TEST(StrictJson, EqualKeysDepthAndOtherTextAreRefused) {
  const auto error = [](const std::string& text, int depth = 3) {
    return message_of([&] { parse_strict_json(text, depth); });
  };
  EXPECT_THAT(error(R"({"a": 1, "b": {"a": 2}, "a": 3})"),
              HasSubstr("key \"a\" occurs twice"));
  EXPECT_THAT(error(R"([{"x": {"b": 1, "b": {}}}])"),
              HasSubstr("key \"b\" occurs twice"));
  EXPECT_EQ(error(R"({"a": {"b": [1]}})"), "");
  EXPECT_EQ(error(R"({"a": {"b": [[]]}})"), "");
  EXPECT_THAT(error(R"({"a": {"b": [[1]]}})"), HasSubstr("nested too deeply"));
  EXPECT_THAT(error(std::string(100'000, '[')), HasSubstr("nested too deeply"));
  for (const char* text : {"", "{", "{\"a\" 1}", "1 2", "{1: 2}", "\xff",
                           "1e999", "{\"\xff\": 1}"}) {
    EXPECT_EQ(error(text), "it is not valid JSON") << text;
  }
}

}  // namespace
}  // namespace lockstep::internal::testing
