// `lockstep bench --tune`: the file it writes is the one that groups read.
#include <gmock/gmock.h>
#include <stdlib.h>

#include "lockstep/comm/shm/tuning_file.h"
#include "tests/cli/bench_command.h"

namespace lockstep::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class BenchTune : public BenchTest {
 protected:
  ~BenchTune() override { unsetenv("LOCKSTEP_TUNING"); }
};

json as_json(const shm::Tuning& tuning) {
  return {{"one_shot_bytes", tuning.one_shot_bytes},
          {"chunk_bytes", tuning.chunk_bytes},
          {"streaming_bytes", tuning.streaming_bytes}};
}

TEST_F(BenchTune, WritesWhatChooseTuningReads) {
  const std::string path = scratch() / "made" / "tuning.json";
  const auto result =
      bench({"--tune", "--ranks=2,3", "--seconds=0.5", "--output", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("# written to " + path + "\n"));
  const auto tables = shm::read_tuning_file(path);
  ASSERT_EQ(tables.size(), 2u);
  setenv("LOCKSTEP_TUNING", path.c_str(), 1);
  for (const auto& table : tables) {
    const auto& found = table.tuning;
    EXPECT_GE(found.one_shot_bytes, 4096u);
    EXPECT_LE(found.one_shot_bytes, 65536u);
    EXPECT_GE(found.chunk_bytes, 65536u);
    EXPECT_LE(found.chunk_bytes, 1u << 20);
    EXPECT_EQ(as_json(shm::choose_tuning(table.ranks)), as_json(found));
    EXPECT_THAT(result.out, HasSubstr(std::to_string(found.chunk_bytes)));
  }
}

TEST_F(BenchTune, GroupsWorkWithTheFilesThresholds) {
  const std::string path = scratch() / "tuning.json";
  const shm::Tuning odd{
      .one_shot_bytes = 192, .chunk_bytes = 12288, .streaming_bytes = 77};
  shm::write_tuning_file(path, {{.ranks = 2, .tuning = odd}});
  const auto document =
      bench_json({"all_reduce", "--peers=protocol", "--sizes=4,1000,100K",
                  "--iters=1", "--rounds=1"},
                 {.environment = {"LOCKSTEP_TUNING=" + path}});
  EXPECT_EQ(document.at("sides").at("protocol").at("tuning"), as_json(odd));
  expect_plausible(document);
}

}  // namespace
}  // namespace lockstep::testing
