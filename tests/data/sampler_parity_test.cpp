#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/data/batch_sampler.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/samplers.h"

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

using Indices = std::vector<size_t>;

// The output of sampler_grid.py; Python is started once.
class SamplerParity : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string python = LOCKSTEP_TORCH_PYTHON;
    if (!std::filesystem::exists(python)) return;
    int status = 0;
    const std::string json = output_of(
        python + " " LOCKSTEP_SOURCE_DIR "/tests/data/sampler_grid.py", status);
    if (status == 0) cases_ = nlohmann::json::parse(json);
  }
  void SetUp() override {
    const std::string python = LOCKSTEP_TORCH_PYTHON;
    if (!std::filesystem::exists(python)) {
      GTEST_SKIP() << "LibTorch has no Python beside it: " << python;
    }
    ASSERT_FALSE(cases_.empty()) << "sampler_grid.py failed";
  }

  // Calls `check` with each case of the kind, and with Python's indices.
  template <class Check>
  static void each(const char* kind, size_t at_least, Check check) {
    ASSERT_GT(cases_[kind].size(), at_least);
    for (nlohmann::json one : cases_[kind]) {
      const auto indices = one["indices"].get<Indices>();
      one.erase("indices");
      SCOPED_TRACE(one.dump().substr(0, 300));
      ASSERT_NO_FATAL_FAILURE(check(one, indices));
    }
  }

  static nlohmann::json cases_;
};
nlohmann::json SamplerParity::cases_;

// Compares a sampler's epoch with Python's indices.
template <class Sampler>
void expect_epoch(Sampler& sampler, const nlohmann::json& expected,
                  const Indices& indices) {
  sampler.set_epoch(expected["epoch"]);
  ASSERT_EQ(sampler.size(), static_cast<int64_t>(indices.size()));
  ASSERT_EQ(sampler.indices(), indices);
  ASSERT_EQ(sampler.begin_pass(), indices);
}

TEST_F(SamplerParity, Distributed) {
  each("distributed", 5000, [](const auto& expected, const Indices& indices) {
    DistributedSampler sampler(expected["size"].template get<int64_t>(),
                               {.num_replicas = expected["num_replicas"],
                                .rank = expected["rank"],
                                .shuffle = expected["shuffle"],
                                .seed = expected["seed"],
                                .drop_last = expected["drop_last"]});
    ASSERT_EQ(sampler.size(), expected["length"].template get<int64_t>());
    expect_epoch(sampler, expected, indices);
  });
}

TEST_F(SamplerParity, Random) {
  each("random", 400, [](const auto& expected, const Indices& indices) {
    RandomSamplerOptions options{.replacement = expected["replacement"],
                                 .seed = expected["seed"]};
    if (!expected["num_samples"].is_null()) {
      options.num_samples = expected["num_samples"].template get<int64_t>();
    }
    RandomSampler sampler(expected["size"].template get<int64_t>(), options);
    expect_epoch(sampler, expected, indices);
  });
}

TEST_F(SamplerParity, SubsetRandom) {
  each("subset", 30, [](const auto& expected, const Indices& indices) {
    SubsetRandomSampler sampler(expected["subset"].template get<Indices>(),
                                {.seed = expected["seed"]});
    expect_epoch(sampler, expected, indices);
  });
}

TEST_F(SamplerParity, WeightedRandom) {
  each("weighted", 100, [](const auto& expected, const Indices& indices) {
    const auto weights =
        expected["weights"].template get<std::vector<double>>();
    const auto samples = expected["num_samples"].template get<int64_t>();
    WeightedRandomSampler sampler(
        weights, samples,
        {.replacement = expected["replacement"], .seed = expected["seed"]});
    expect_epoch(sampler, expected, indices);
    DistributedWeightedSampler shared(weights, samples,
                                      {.num_replicas = 1,
                                       .rank = 0,
                                       .replacement = expected["replacement"],
                                       .seed = expected["seed"]});
    expect_epoch(shared, expected, indices);
  });
}

TEST_F(SamplerParity, Batch) {
  ASSERT_EQ(cases_["batch"].size(), 40u);
  for (const auto& expected : cases_["batch"]) {
    SCOPED_TRACE(expected.dump());
    SequentialSampler sampler(expected["size"].get<int64_t>());
    BatchSampler batches(sampler, expected["batch_size"],
                         expected["drop_last"]);
    EXPECT_EQ(batches.size(), expected["length"].get<int64_t>());
    const BatchList list = batches.begin_pass();
    std::vector<Indices> cut;
    size_t begin = 0;
    for (const size_t end : list.ends) {
      cut.emplace_back(list.indices.begin() + begin,
                       list.indices.begin() + end);
      begin = end;
    }
    EXPECT_EQ(cut, expected["batches"].get<std::vector<Indices>>());
  }
}

}  // namespace
}  // namespace lockstep::internal
