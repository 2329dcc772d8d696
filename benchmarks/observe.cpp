// Measures the cost of watching a training (`./dev bench observe`): the same
// training steps without anything, and with each of
//
//   logs      a ProgressBar in every step, a scalar of MetricsLogger and of
//             SummaryWriter in every 10th, and a SystemMetricsSampler
//   watched   somebody looks at the job: the ranks publish for `lockstep top`
//   profiler  a Profiler with a schedule that records 2 of 100 steps
//
//   build/bin/lockstep run --nproc-per-node=2
//       build/bin/benchmarks/observe --model mlp --folder build/bench/observe
//
// The ways alternate in blocks of steps, so that what disturbs the machine for
// a while disturbs all of them. A block takes as long as it took the slowest
// rank. Rank 0 prints one line of JSON: the blocks' microseconds for each way.

#include <chrono>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/base/environment.h>
#include <lockstep/launch/watch/job_link.h>
#include <lockstep/lockstep.h>
#include <lockstep/optim/sgd.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "benchmarks/ddp_step/workloads.h"

namespace {

using benchmarks::Batches, benchmarks::Workload;
using Clock = std::chrono::steady_clock;
using Ddp = lockstep::DistributedDataParallel<torch::nn::Sequential>;

constexpr int64_t kLogEvery = 10;
constexpr lockstep::ProfilerSchedule kSchedule{
    .wait = 97, .warmup = 1, .active = 2};

struct Options {
  std::string model = "mlp";
  std::string folder;
  int64_t steps = 100;  // of a block
  int64_t blocks = 20;  // of each way
};

// Does one thing beside a step, from construction to destruction.
struct Watching {
  virtual ~Watching() = default;
  virtual void after(int64_t /*step*/, const at::Tensor& /*loss*/) {}
};

class Logs final : public Watching {
 public:
  Logs(const std::string& folder, int64_t steps)
      : bar_(steps, {.file = std::fopen("/dev/null", "w")}),
        metrics_(folder + "/metrics.csv", {.overwrite = true}),
        summary_(folder + "/runs"),
        sampler_(summary_) {}
  void after(int64_t step, const at::Tensor& loss) override {
    bar_.update();
    if (step % kLogEvery != 0) return;
    const double value = loss.item<double>();
    metrics_.log({{"loss", value}}, step);
    summary_.add_scalar("loss", value, step);
  }

 private:
  lockstep::ProgressBar bar_;
  lockstep::MetricsLogger metrics_;
  lockstep::SummaryWriter summary_;
  lockstep::SystemMetricsSampler sampler_;
};

// Rank 0 asks its agent every second, as `lockstep top` does.
class Watched final : public Watching {
 public:
  Watched() {
    if (lockstep::get_rank() != 0) return;
    const auto agent = lockstep::internal::get_env("LOCKSTEP_AGENT");
    if (!agent) throw std::runtime_error("start this with lockstep run");
    link_.emplace(lockstep::internal::RunningJob{.socket = *agent});
    thread_ = std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        link_->watch();
        for (int i = 0; i < 100 && !stop.stop_requested(); ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
      }
    });
  }

 private:
  std::optional<lockstep::internal::JobLink> link_;
  std::jthread thread_;
};

class Profiled final : public Watching {
 public:
  explicit Profiled(const std::string& folder)
      : profiler_({.folder = folder + "/traces", .schedule = kSchedule}) {}
  void after(int64_t /*step*/, const at::Tensor& /*loss*/) override {
    profiler_.step();
  }

 private:
  lockstep::Profiler profiler_;
};

const std::vector<std::string> kWays{"nothing", "logs", "watched", "profiler"};

std::unique_ptr<Watching> watching(const std::string& way,
                                   const Options& options) {
  if (way == "logs")
    return std::make_unique<Logs>(options.folder, options.steps);
  if (way == "watched") return std::make_unique<Watched>();
  if (way == "profiler") return std::make_unique<Profiled>(options.folder);
  return std::make_unique<Watching>();
}

void run(const Options& options) {
  torch::set_num_threads(1);
  auto group = lockstep::init_process_group();
  const Workload& workload = benchmarks::workloads().at(options.model);
  torch::manual_seed(0);
  auto module = workload.model();
  Ddp ddp(module);
  lockstep::optim::SGD optimizer(module->parameters(), {.lr = 1e-3});
  const auto batches = workload.batches(workload.batch_size);

  std::map<std::string, std::vector<double>> microseconds;
  // The first block of each way warms up.
  for (int64_t block = -1; block < options.blocks; ++block) {
    for (size_t turn = 0; turn < kWays.size(); ++turn) {
      // Each way comes at each place of the order.
      const auto place = static_cast<size_t>(block + 1) + turn;
      const std::string& way = kWays[place % kWays.size()];
      const auto beside = watching(way, options);
      lockstep::barrier();
      const auto begin = Clock::now();
      for (int64_t step = 0; step < options.steps; ++step) {
        auto& batch = batches->next();
        optimizer.zero_grad();
        const auto loss = workload.loss(ddp.forward(batch.data), batch.target);
        loss.backward();
        optimizer.step();
        beside->after(step, loss.detach());
      }
      auto took = torch::tensor(
          std::chrono::duration<double, std::micro>(Clock::now() - begin)
              .count(),
          torch::kFloat64);
      lockstep::all_reduce(took, {.op = lockstep::ReduceOp::MAX});
      if (block >= 0) microseconds[way].push_back(took.item<double>());
    }
  }
  if (lockstep::get_rank() != 0) return;
  const nlohmann::json line{{"model", options.model},
                            {"steps", options.steps},
                            {"block_us", microseconds}};
  std::printf("%s\n", line.dump().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("what it costs to watch a training");
  app.add_option("--model", options.model)
      ->check(CLI::IsMember(benchmarks::workloads()));
  app.add_option("--folder", options.folder, "for logs and traces")->required();
  app.add_option("--steps", options.steps)->check(CLI::Range(1, 1'000'000));
  app.add_option("--blocks", options.blocks)->check(CLI::Range(1, 10'000));
  CLI11_PARSE(app, argc, argv);
  try {
    run(options);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "observe: %s\n", error.what());
  }
  return 1;
}
