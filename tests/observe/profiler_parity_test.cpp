// Schedules, operators and metadata are those of torch.profiler.
// profiler_peer.py is the Python side; it runs once.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/observe/profiler.h"
#include "tests/harness/python_peer.h"
#include "tests/harness/running_program.h"
#include "tests/harness/temporary_folder.h"
#include "tests/observe/trace.h"

namespace lockstep::internal {
namespace {

using namespace testing;  // NOLINT
using nlohmann::json;

constexpr int kSteps = 40;

std::vector<ProfilerSchedule> many_schedules() {
  std::vector<ProfilerSchedule> all;
  for (int64_t wait : {0, 1, 3}) {
    for (int64_t warmup : {0, 2}) {
      for (int64_t active : {1, 2, 4}) {
        for (int64_t repeat : {0, 1, 2}) {
          for (int64_t skip_first : {0, 5}) {
            for (bool skip_first_wait : {false, true}) {
              all.push_back(
                  {wait, warmup, active, repeat, skip_first, skip_first_wait});
            }
          }
        }
      }
    }
  }
  return all;
}

json names_of(const json& object) {
  json names = json::array();
  for (const auto& [name, value] : object.items()) names.push_back(name);
  return names;
}

TEST(ProfilerParity, SchedulesOperatorsAndMetadataArePythons) {
  if (!std::filesystem::exists(LOCKSTEP_TORCH_PYTHON)) {
    GTEST_SKIP() << "no " << LOCKSTEP_TORCH_PYTHON;
  }
  const TemporaryFolder folder;
  json schedules = json::array();
  for (const auto& one : many_schedules()) {
    schedules.push_back({{"wait", one.wait},
                         {"warmup", one.warmup},
                         {"active", one.active},
                         {"repeat", one.repeat},
                         {"skip_first", one.skip_first},
                         {"skip_first_wait", int{one.skip_first_wait}}});
  }
  folder.write("asked.json",
               json({{"steps", kSteps}, {"schedules", schedules}}).dump());
  run_python_peer(
      {.arguments = {LOCKSTEP_SOURCE_DIR "/tests/observe/profiler_peer.py",
                     folder.path()},
       .allowed = std::chrono::seconds(90)});
  ASSERT_FALSE(HasFailure());

  const auto theirs =
      json::parse(testing::read_file(folder.file("states.json")));
  const auto all = many_schedules();
  ASSERT_EQ(theirs.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    std::vector<int> ours;
    for (int step = 0; step < kSteps; ++step) {
      ours.push_back(static_cast<int>(action_at(all[i], step)));
    }
    EXPECT_EQ(json(ours), theirs[i]) << schedules[i];
  }

  torch::set_num_threads(1);
  auto group = init_process_group(
      "gloo", {.init_method = "file://" + folder.file("store"),
               .world_size = 1,
               .rank = 0});
  // Operations in which LibTorch's C++ frontend differs from Python's (Linear
  // without aten::linear, another memory format of the first gradient) is
  // spelled out.
  const auto parameter = [](at::IntArrayRef sizes) {
    return torch::ones(sizes, torch::requires_grad());
  };
  const std::vector<at::Tensor> parameters{parameter({16, 8}), parameter({16}),
                                           parameter({4, 16}), parameter({4})};
  const auto x = torch::ones({2, 8});
  const auto y = torch::ones({2, 4});
  const auto step = [&] {
    for (const auto& each : parameters) each.mutable_grad().reset();
    const auto hidden =
        torch::relu(torch::linear(x, parameters[0], parameters[1]));
    const auto output = torch::linear(hidden, parameters[2], parameters[3]);
    const auto loss = torch::mse_loss(output, y);
    loss.backward(torch::ones({}));
  };
  step();
  {
    Profiler profiler({.folder = folder.path(),
                       .schedule = {{.warmup = 1, .active = 2, .repeat = 1}},
                       .record_shapes = true});
    for (int i = 0; i < 4; ++i) {
      step();
      profiler.step();
    }
  }
  const Trace ours(folder.file("rank0.1.pt.trace.json"));
  const Trace python(folder.file("python.json"));
  EXPECT_EQ(ours.counts("aten::"), python.counts("aten::"));
  EXPECT_EQ(ours.counts("autograd::"), python.counts("autograd::"));
  EXPECT_EQ(ours.counts("ProfilerStep"), python.counts("ProfilerStep"));

  const auto& info = ours["distributedInfo"];
  const auto& want = python["distributedInfo"];
  EXPECT_EQ(names_of(info), names_of(want));
  for (const char* key : {"backend", "rank", "world_size", "pg_count"}) {
    EXPECT_EQ(info.at(key), want.at(key)) << key;
  }
  ASSERT_EQ(info.at("pg_config").size(), want.at("pg_config").size());
  const auto& config = info.at("pg_config")[0];
  const auto& wanted = want.at("pg_config")[0];
  EXPECT_EQ(names_of(config), names_of(wanted));
  for (const char* key : {"pg_name", "pg_desc", "pg_size", "ranks"}) {
    EXPECT_EQ(config.at(key), wanted.at(key)) << key;
  }
}

}  // namespace
}  // namespace lockstep::internal
