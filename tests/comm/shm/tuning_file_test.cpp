#include "lockstep/comm/shm/tuning_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace lockstep::shm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr Tuning kSmall{
    .one_shot_bytes = 1024, .chunk_bytes = 8192, .streaming_bytes = 1 << 20};
constexpr Tuning kLarge{
    .one_shot_bytes = 4096, .chunk_bytes = 1 << 18, .streaming_bytes = 1 << 24};

// With a folder of its own, and no variable that names a file.
class TuningFile : public ::testing::Test {
 protected:
  TuningFile() {
    auto pattern =
        (std::filesystem::temp_directory_path() / "lockstep-tuning-XXXXXX")
            .string();
    folder_ = ::mkdtemp(pattern.data());
    ::unsetenv("LOCKSTEP_TUNING");
    ::setenv("XDG_CONFIG_HOME", folder_.c_str(), 1);
  }
  ~TuningFile() override {
    ::unsetenv("LOCKSTEP_TUNING");
    ::unsetenv("XDG_CONFIG_HOME");
    std::filesystem::remove_all(folder_);
  }

  std::filesystem::path write(const std::string& text) const {
    auto path = folder_ / "given.json";
    std::ofstream(path) << text;
    return path;
  }

  std::filesystem::path folder_;
};

TEST_F(TuningFile, WhatWasWrittenIsRead) {
  const auto path = folder_ / "new" / "tuning.json";
  write_tuning_file(path, {{2, kSmall}, {8, kLarge}});
  auto tables = read_tuning_file(path);
  ASSERT_EQ(tables.size(), 2u);
  EXPECT_EQ(tables[0].ranks, 2);
  EXPECT_EQ(tables[0].tuning.one_shot_bytes, kSmall.one_shot_bytes);
  EXPECT_EQ(tables[1].tuning.chunk_bytes, kLarge.chunk_bytes);
  EXPECT_EQ(tables[1].tuning.streaming_bytes, kLarge.streaming_bytes);
  write_tuning_file(path, {{4, kLarge}});  // replaces
  EXPECT_EQ(read_tuning_file(path).size(), 1u);
  // Nothing beside it is left.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_ / "new"),
                          std::filesystem::directory_iterator{}),
            1);
}

TEST_F(TuningFile, TheTableOfTheNearestNumberOfRanksCounts) {
  EXPECT_EQ(choose_tuning(3).chunk_bytes, default_tuning(3).chunk_bytes);
  write_tuning_file(tuning_file_path(), {{8, kLarge}, {2, kSmall}});
  for (int ranks : {1, 2, 4, 5}) {
    EXPECT_EQ(choose_tuning(ranks).chunk_bytes, kSmall.chunk_bytes) << ranks;
  }
  for (int ranks : {6, 8, 64}) {
    EXPECT_EQ(choose_tuning(ranks).chunk_bytes, kLarge.chunk_bytes) << ranks;
  }
  write_tuning_file(tuning_file_path(), {});
  EXPECT_EQ(choose_tuning(3).chunk_bytes, default_tuning(3).chunk_bytes);
}

TEST_F(TuningFile, TheVariableNamesAFileThatMustBeThere) {
  write_tuning_file(tuning_file_path(), {{2, kSmall}});
  const auto other = folder_ / "other.json";
  ::setenv("LOCKSTEP_TUNING", other.c_str(), 1);
  EXPECT_THAT([] { choose_tuning(2); },
              ThrowsMessage<std::invalid_argument>(
                  AllOf(HasSubstr(other.string()), HasSubstr("cannot be read"),
                        HasSubstr("LOCKSTEP_TUNING"))));
  write_tuning_file(other, {{2, kLarge}});
  EXPECT_EQ(choose_tuning(2).chunk_bytes, kLarge.chunk_bytes);
}

TEST_F(TuningFile, BadContentIsRefusedWithPathAndPlace) {
  const std::string good =
      R"({"ranks": 2, "one_shot_bytes": 1024, "chunk_bytes": 8192,)"
      R"( "streaming_bytes": 65536})";
  auto with = [](const std::string& tables) {
    return R"({"version": 1, "tables": [)" + tables + "]}";
  };
  ASSERT_EQ(read_tuning_file(write(with(good))).size(), 1u);
  const std::pair<std::string, std::string> cases[] = {
      {"{", "not valid JSON"},
      {"[]", "not an object"},
      {R"({"version": 1})", R"(has no "tables")"},
      {R"({"version": 2, "tables": []})", "version is 2"},
      {R"({"version": 1, "tables": {}})", "not a list"},
      {R"({"version": 1, "tables": [], "host": ""})", R"(field "host")"},
      {with("3"), "tables[0] is not an object"},
      {with(good + "," + good), "twice"},
      {with(R"({"ranks": 2})"), "tables[0] has no"},
      {with(R"({"ranks": 65, "one_shot_bytes": 1024, "chunk_bytes": 8192,)"
            R"( "streaming_bytes": 1})"),
       "tables[0].ranks is 65"},
      {with(R"({"ranks": 2, "one_shot_bytes": -64, "chunk_bytes": 8192,)"
            R"( "streaming_bytes": 1})"),
       "tables[0].one_shot_bytes is -64"},
      {with(R"({"ranks": 2, "one_shot_bytes": 1000, "chunk_bytes": 8192,)"
            R"( "streaming_bytes": 1})"),
       "2 ranks"},
      {with(good) + std::string(100'000, ' '), "too large"},
  };
  for (const auto& [text, words] : cases) {
    const auto path = write(text);
    EXPECT_THAT([&] { read_tuning_file(path); },
                ThrowsMessage<std::invalid_argument>(
                    AllOf(HasSubstr(path.string()), HasSubstr(words))))
        << text.substr(0, 200);
  }
}

TEST_F(TuningFile, WhatCouldNotBeReadIsNotWritten) {
  const auto path = folder_ / "tuning.json";
  EXPECT_THROW(write_tuning_file(path, {{0, kSmall}}), std::invalid_argument);
  EXPECT_THROW(write_tuning_file(path, {{2, kSmall}, {2, kLarge}}),
               std::invalid_argument);
  auto odd = kSmall;
  odd.chunk_bytes = 100;
  EXPECT_THROW(write_tuning_file(path, {{2, odd}}), std::invalid_argument);
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_ANY_THROW(write_tuning_file("/proc/none/tuning.json", {{2, kSmall}}));
}

}  // namespace
}  // namespace lockstep::shm
