// `lockstep inspect snapshot` on files written for the test: what it lists,
// what it finds damaged, and how two snapshots differ.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/snapshot.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal::testing {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const std::string kHead = "lockstep inspect snapshot: ";

class InspectSnapshot : public ProgramTest {
 protected:
  static Snapshot sample() {
    Snapshot snapshot;
    torch::manual_seed(1);
    auto weight = torch::randn({3, 4});
    snapshot.model_state = {
        {"0.weight", weight},
        {"0.count", torch::tensor(7, torch::kLong)},
        {"0.empty", torch::empty({0, 2}, torch::kHalf)},
        {"0.phase", torch::full({2}, c10::complex<double>(3, 4))}};
    OptimizerState optimizer;
    optimizer.state[0]["exp_avg"] = weight * 2;
    optimizer.state[0]["step"] = 3.0;
    optimizer.param_groups.push_back({.options = {{"lr", 0.1}}, .params = {0}});
    snapshot.optimizer_state = optimizer;
    snapshot.epochs_run = 4;
    snapshot.step = 12;
    snapshot.sampler_state = {{"position", 64}};
    snapshot.metadata = {{"run", "seventh"}};
    return snapshot;
  }
  std::string saved(const std::string& name, const Snapshot& snapshot) const {
    const auto path = (scratch() / name).string();
    save_snapshot_file(path, snapshot);
    return path;
  }
  ProgramResult inspect(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(),
                     {LOCKSTEP_BIN_DIR "/lockstep", "inspect", "snapshot"});
    return run_program(arguments, {}, std::chrono::seconds(60));
  }
  std::string one_line_error(const std::vector<std::string>& arguments,
                             int exit_code) {
    const auto result = inspect(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
    return result.err;
  }
};

TEST_F(InspectSnapshot, ListsEveryTensorOfBothFormats) {
  for (const char* name : {"a.pt", "a.safetensors"}) {
    const auto path = saved(name, sample());
    const auto result = inspect({path});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out,
                AllOf(StartsWith(path + ": 5 tensors, 120 B, epoch 4 has "
                                        "ended, step 12\n"),
                      HasSubstr("  sampler position: 64\n"),
                      HasSubstr("  run: seventh\n"),
                      HasSubstr("0.weight             [3, 4]  float32"),
                      HasSubstr("optimizer.0.exp_avg  [3, 4]  float32"),
                      Not(HasSubstr("norm"))));
    const auto verified = inspect({"--verify", path});
    EXPECT_EQ(verified.exit_code, 0) << verified.err;
    EXPECT_THAT(verified.out, AllOf(HasSubstr("norm\n"), HasSubstr("7.07107\n"),
                                    HasSubstr("every checksum")));
    const auto document =
        json::parse(inspect({"--json", "--verify", path}).out);
    EXPECT_EQ(document.at("step"), 12);
    EXPECT_EQ(document.at("tensors").size(), 5u);
    // Safetensors files have an order of their own.
    for (const auto& tensor : document.at("tensors")) {
      if (tensor.at("name") != "0.weight") continue;
      EXPECT_EQ(tensor.at("shape"), json({3, 4}));
      EXPECT_NEAR(tensor.at("norm").get<double>(),
                  std::get<1>(sample().model_state[0]).norm().item<double>(),
                  1e-6);
    }
  }
}

TEST_F(InspectSnapshot, ADamagedFileIsOneLine) {
  const auto path = saved("a.pt", sample());
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const std::string content((std::istreambuf_iterator<char>(file)), {});
  auto weight = std::get<1>(sample().model_state[0]);
  const std::string bytes(static_cast<const char*>(weight.const_data_ptr()),
                          16);
  const auto at = content.find(bytes);
  ASSERT_NE(at, std::string::npos);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(static_cast<char>(content[at] ^ 1));
  file.close();
  EXPECT_THAT(one_line_error({"--verify", path}, 1),
              StartsWith(kHead + "snapshot \"" + path + "\" is damaged"));
}

TEST_F(InspectSnapshot, WhatCannotBeReadIsOneLine) {
  EXPECT_THAT(one_line_error({(scratch() / "none").string()}, 2),
              AllOf(StartsWith(kHead), HasSubstr("No such file")));
  std::ofstream(scratch() / "text") << "no snapshot, but long enough";
  EXPECT_THAT(one_line_error({(scratch() / "text").string()}, 1),
              AllOf(StartsWith(kHead), HasSubstr("neither")));
  EXPECT_THAT(one_line_error({}, 2), HasSubstr("PATH is required"));
}

TEST_F(InspectSnapshot, DifferencesAreNamedWithTheirSize) {
  const auto a = saved("a.pt", sample());
  // The same numbers in the other format are no difference.
  EXPECT_EQ(inspect({"--diff", saved("b.safetensors", sample()), a}).exit_code,
            0);
  auto other = sample();
  other.step = 13;
  std::get<1>(other.model_state[0])[1][2] += 0.5;
  std::get<1>(other.model_state[1]) = torch::tensor(7, torch::kInt);
  std::get<1>(other.model_state[2]) = torch::empty({0, 3}, torch::kHalf);
  std::get<0>(other.model_state[3]) = "0.angle";
  const auto result = inspect({"--diff", saved("c.pt", other), a});
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_THAT(
      result.out,
      AllOf(HasSubstr("1 tensor is equal, 6 differences\n"),
            HasSubstr("12 and 13"), HasSubstr("1 of 12 elements differ   "),
            HasSubstr("       0.5\n"), HasSubstr("dtype int64 and int32\n"),
            HasSubstr("shape [0, 2] and [0, 3]\n"),
            HasSubstr("0.phase   only in A\n"),
            HasSubstr("0.angle   only in B\n")));
  const auto document =
      json::parse(inspect({"--json", "--diff", saved("c.pt", other), a}).out);
  EXPECT_EQ(document.at("differences").size(), 6u);
}

TEST_F(InspectSnapshot, NaNsInBothAreEqual) {
  auto first = sample();
  std::get<1>(first.model_state[0])[0][0] =
      std::numeric_limits<float>::quiet_NaN();
  auto second = sample();
  const auto a = saved("a.pt", first);
  EXPECT_EQ(inspect({"--diff", saved("b.pt", first), a}).exit_code, 0);
  const auto result = inspect({"--diff", saved("c.pt", second), a});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out, HasSubstr("nan\n"));
}

}  // namespace
}  // namespace lockstep::internal::testing
