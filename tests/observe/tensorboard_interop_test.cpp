// TensorBoard reads what SummaryWriter writes, and it is what Python's
// torch.utils.tensorboard writes for the same calls. tensorboard_peer.py makes
// those and compares.

#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <filesystem>
#include <limits>
#include <string>

#include "lockstep/observe/histogram.h"
#include "lockstep/observe/metrics_logger.h"
#include "lockstep/observe/summary_writer.h"
#include "tests/harness/in_child.h"
#include "tests/harness/running_program.h"

namespace lockstep::internal {
namespace {

using namespace lockstep::internal::testing;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The same calls as write_everything() of the peer.
void write_everything(const std::string& folder) {
  SummaryWriter writer(folder);
  writer.add_scalar("train/loss", 0.1, 1, 1000.5);
  writer.add_scalar("train/loss", -2.0, 2, 1001.5);
  writer.add_scalar("train/loss", 0.0, int64_t{1} << 40, 1002.5);
  writer.add_scalar("train/loss", kNaN, -3, 1003.5);
  writer.add_scalar("train/loss", -kInfinity, 0, 1004.5);
  writer.add_scalar("Verlust ü/日本", torch::full({1, 1}, 7, torch::kLong), 5,
                    1005.5);
  writer.add_scalar("half", torch::tensor(0.1, torch::kHalf), 5, 1005.5);
  writer.add_scalars("curves/main", {{"a", 1.5}, {"b/c", -2.0}}, 4, 1006.5);
  writer.add_scalars("curves/main", {{"a", 2.5}}, 5, 1007.5);

  const auto numbers = (torch::arange(5000) * 37 % 1001 - 500) / 7;
  const std::vector<std::pair<std::string, at::Tensor>> histograms{
      {"floats", numbers.clone().requires_grad_()},
      {"matrix", numbers.reshape({50, 100}).t()},
      {"halves", numbers.to(torch::kHalf)},
      {"integers", torch::arange(100)},
      {"bools", torch::tensor({true, false, true})},
      {"one", torch::tensor(3.0f)},
      {"edges", torch::tensor(default_bin_edges(), torch::kDouble)},
      {"special", torch::tensor({0.0, -0.0, 1e-12, -1e-12, 5e-13, 1e25, -3.0},
                                torch::kDouble)},
      {"broken",
       torch::tensor({kNaN, 1.0, kInfinity, 2.0, -kInfinity}, torch::kFloat)},
  };
  for (const auto& [tag, values] : histograms) {
    writer.add_histogram("histograms/" + tag, values, 6, {}, 1008.5);
  }
  const auto between =
      torch::tensor({-1.5, -1.0, -0.5, 0.0, 0.25, 0.5, 2.0, 2.5});
  writer.add_histogram("bins/gaps", between, 6, {-1, 0, 0.5, 2}, 1009.5);
  writer.add_histogram("bins/two", between, 6, {0, 1}, 1009.5);
  writer.add_histogram("bins/right", between, 6, {1, 2, 2.25}, 1009.5);
  std::vector<double> narrow;
  for (int k = -3; k < 300; ++k) narrow.push_back(2 + k / 1024.0);
  writer.add_histogram("bins/narrow", between, 6, narrow, 1009.5);

  writer.add_text("note", "**bold** ü\nline", 7, 1010.5);
  writer.add_text("note", "", 8, 1011.5);

  const auto colours = (torch::arange(3 * 4 * 5) / 50 - 0.1).reshape({3, 4, 5});
  colours[0][0][0] = 0.999;
  const auto bytes =
      torch::arange(4 * 5 * 3, torch::kByte).reshape({4, 5, 3}) * 4;
  writer.add_image("chw", colours, 9, 1012.5);
  writer.add_image("gray", colours.slice(0, 0, 1), 9, 1012.5);
  writer.add_image("hwc", bytes, 9, 1012.5, "HWC");
  writer.add_image("hw", colours[1].to(torch::kDouble), 9, 1012.5, "HW");
  writer.add_image("rgba", torch::cat({colours, colours.slice(0, 0, 1)}), 9,
                   1012.5);

  const auto many =
      (torch::arange(10 * 3 * 2 * 4) / 240).reshape({10, 3, 2, 4});
  writer.add_images("many", many, 9, 1012.5);
  writer.add_images("few", many.slice(0, 0, 3).slice(1, 0, 1), 9, 1012.5);

  writer.add_hparams({{"lr", 0.1}, {"batch", 32}, {"optimizer", "adam"}},
                     {{"hparam/accuracy", 0.9}, {"hparam/loss", 0.0}}, "tried",
                     10);
  SummaryWriter resumed(folder + "/resumed", {.purge_step = 5});
  resumed.add_scalar("a", 1.0, 5, 1013.5);
}

// Values that Python cannot write, or writes in another way.
void write_alone(const std::string& folder) {
  SummaryWriter writer(folder);
  writer.add_histogram("nothing", torch::tensor({kNaN, kInfinity}));
  writer.add_hparams({{"amp", true}}, {}, "tried");

  for (const int64_t begin : {1, 3}) {
    SummaryWriterOptions options;
    if (begin > 1) options.purge_step = begin;
    SummaryWriter again(folder + "/restarted", options);
    for (int64_t step = begin; step <= 4; ++step) {
      again.add_scalar("a", static_cast<double>(begin > 1 ? 10 * step : step),
                       step);
    }
  }

  in_child([&] {
    SummaryWriter killed(folder + "/killed", {.max_queue = 1000});
    for (int64_t step = 0; step < 3; ++step) {
      killed.add_scalar("a", static_cast<double>(step), step);
    }
    killed.flush();
    killed.add_scalar("a", 3, 3);
    ::raise(SIGKILL);
    return 0;
  });

  MetricsLogger csv(folder + "/metrics.csv");
  csv.log({{"loss", 0.1}}, 1);
  csv.log({{"loss", kNaN}, {"a, b", -kInfinity}}, 2);
  MetricsLogger json(folder + "/metrics.jsonl");
  json.log({{"loss", 0.1}}, 1);
  json.log({{"loss", kNaN}, {"ü \"", 1e-300}}, 2);
}

using TensorBoardInterop = ProgramTest;

TEST_F(TensorBoardInterop, ReadsTheSameEventsAsFromPython) {
  const std::string python = LOCKSTEP_TORCH_PYTHON;
  if (!std::filesystem::exists(python)) {
    GTEST_SKIP() << "LibTorch has no Python beside it: " << python;
  }
  write_everything(scratch() / "ours");
  write_alone(scratch() / "alone");
  const auto result = run_program(
      {python, LOCKSTEP_SOURCE_DIR "/tests/observe/tensorboard_peer.py",
       scratch()},
      {}, std::chrono::seconds(60));
  if (result.exit_code == 77) {
    GTEST_SKIP() << "Python lacks a package: " << result.out;
  }
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

}  // namespace
}  // namespace lockstep::internal
