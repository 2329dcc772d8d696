#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/data/distributed_sampler.h"

namespace lockstep::internal {
namespace {

// Returns what `command` printed, and its exit status in `status`.
std::string output_of(const std::string& command, int& status) {
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) {
    status = -1;
    return output;
  }
  std::array<char, 1 << 16> chunk;
  while (size_t read = fread(chunk.data(), 1, chunk.size(), pipe)) {
    output.append(chunk.data(), read);
  }
  status = pclose(pipe);
  return output;
}

TEST(SamplerParity, SameIndicesAsPythonOverTheGrid) {
  const std::string python = LOCKSTEP_TORCH_PYTHON;
  if (!std::filesystem::exists(python)) {
    GTEST_SKIP() << "LibTorch has no Python beside it: " << python;
  }
  int status = 0;
  std::string json = output_of(
      python + " " LOCKSTEP_SOURCE_DIR "/tests/data/sampler_grid.py", status);
  ASSERT_EQ(status, 0) << "sampler_grid.py failed";
  nlohmann::json cases = nlohmann::json::parse(json);
  ASSERT_GT(cases.size(), 5000u);
  for (const auto& expected : cases) {
    DistributedSampler sampler(expected["size"].get<int64_t>(),
                               {.num_replicas = expected["num_replicas"],
                                .rank = expected["rank"],
                                .shuffle = expected["shuffle"],
                                .seed = expected["seed"],
                                .drop_last = expected["drop_last"]});
    sampler.set_epoch(expected["epoch"]);
    nlohmann::json named = expected;
    named.erase("indices");
    ASSERT_EQ(sampler.size(), expected["length"].get<int64_t>()) << named;
    auto indices = expected["indices"].get<std::vector<size_t>>();
    ASSERT_EQ(sampler.indices(), indices) << named;
    ASSERT_EQ(sampler.begin_pass(), indices) << named;
  }
}

}  // namespace
}  // namespace lockstep::internal
