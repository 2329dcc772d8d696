#include "lockstep/comm/shm/protocol/tuning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <tuple>

namespace lockstep::internal::shm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr size_t kKiB = 1024;
constexpr size_t kMiB = 1024 * kKiB;
constexpr Tuning kSome{
    .one_shot_bytes = 1024, .chunk_bytes = 8192, .streaming_bytes = 1 << 20};

class TuningVariable : public ::testing::Test {
 protected:
  TuningVariable() { ::unsetenv("LOCKSTEP_TUNING"); }
  ~TuningVariable() override { ::unsetenv("LOCKSTEP_TUNING"); }
};

// The expected values are those measured to be best;
// docs/internals/shared-memory.md has the table.
TEST(Tuning, TheCachesOfTheMeasuredMachineGiveWhatWasMeasured) {
  const CacheSizes server{
      .level1 = 48 * kKiB, .level2 = 2 * kMiB, .last = 480 * kMiB};
  for (const auto& [ranks, one_shot, chunk] :
       {std::tuple{2, 32, 1024}, {4, 32, 512}, {8, 32, 256}, {16, 16, 128}}) {
    const auto tuning = default_tuning(ranks, server);
    EXPECT_EQ(tuning.one_shot_bytes, one_shot * kKiB) << ranks;
    EXPECT_EQ(tuning.chunk_bytes, chunk * kKiB) << ranks;
    EXPECT_EQ(tuning.streaming_bytes, 32 * kMiB) << ranks;
  }
}

TEST(Tuning, AnyCachesGiveThresholdsThatAreAllowed) {
  for (const size_t level1 : {0, 1, 16 * 1024, 100'000, 1 << 20}) {
    for (const size_t level2 : {0, 1, 128 * 1024, 3'000'000, 1 << 30}) {
      for (const int ranks : {1, 2, 3, 7, 64}) {
        EXPECT_NO_THROW(check(default_tuning(
            ranks, {.level1 = level1, .level2 = level2, .last = level2})));
      }
    }
  }
  EXPECT_NO_THROW(check(default_tuning(2)));
}

TEST_F(TuningVariable, ReplacesWhatItNames) {
  ::setenv("LOCKSTEP_TUNING", "chunk_bytes=12288,streaming_bytes=77", 1);
  const auto chosen = choose_tuning(2);
  EXPECT_EQ(chosen.one_shot_bytes, default_tuning(2).one_shot_bytes);
  EXPECT_EQ(chosen.chunk_bytes, 12288u);
  EXPECT_EQ(chosen.streaming_bytes, 77u);
}

TEST_F(TuningVariable, EmptyCountsAsUnset) {
  ::setenv("LOCKSTEP_TUNING", "", 1);
  EXPECT_EQ(choose_tuning(3).chunk_bytes, default_tuning(3).chunk_bytes);
}

TEST_F(TuningVariable, WhatIsWrongIsNamed) {
  const auto expect_refused = [](const char* text, const char* why) {
    EXPECT_THAT(([&] { parse_tuning(text, kSome); }),
                ThrowsMessage<std::invalid_argument>(AllOf(
                    HasSubstr(std::string("LOCKSTEP_TUNING is \"") + text),
                    HasSubstr(why), HasSubstr("one_shot_bytes=4096"))))
        << text;
  };
  expect_refused("/no/such", "\"/no/such\" is not NAME=BYTES");
  expect_refused("one_shot_bytes", "is not NAME=BYTES");
  expect_refused("chunk_bytes=4096,", "\"\" is not NAME=BYTES");
  expect_refused("chunks=4096", "is not NAME=BYTES");
  expect_refused("chunk_bytes=4K", "chunk_bytes");
  expect_refused("chunk_bytes=-4096", "chunk_bytes");
  expect_refused("chunk_bytes=5000", "a multiple of 4096");
  expect_refused("one_shot_bytes=0", "a multiple of 64");
  expect_refused("chunk_bytes=134217728", "to 67108864");
}

// A bug: reduce_scatter divided by zero on all ranks.
TEST_F(TuningVariable, AChunkHasRoomForAllRanks) {
  ::setenv("LOCKSTEP_TUNING", "chunk_bytes=4096", 1);
  EXPECT_EQ(choose_tuning(16).chunk_bytes, 4096u);
  EXPECT_THAT([] { choose_tuning(17); },
              ThrowsMessage<std::invalid_argument>(HasSubstr(
                  "chunk_bytes is 4096; with 17 ranks it must be at least "
                  "4352")));
}

}  // namespace
}  // namespace lockstep::internal::shm
