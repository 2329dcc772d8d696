// The training steps of `./dev bench`: what peers/ddp_peer.py does in Python,
// here with LibTorch and Lockstep.
//
//   build/bin/lockstep run --standalone --nproc-per-node=2
//       build/bin/benchmarks/ddp_step --model mlp
//
// Every rank trains the same model on its own samples, on one thread unless
// --threads says another number: the next batch, zero_grad, forward, loss,
// backward, the optimizer's step. A step takes as long as it took the slowest
// rank. Rank 0 prints one line of JSON (docs/internals/benchmarks.md) with the
// peer's fields and some more:
//
//   {"peer": "lockstep", "model": "mlp", "optimizer": "sgd", "ddp": true,
//    "backend": "lockstep", "ranks": 2, "threads": 1, "batch_size": 32,
//    "parameters": 4241409, "steps": 100, "warmup": 20, "median_us": ...,
//    "mean_us": ..., "p10_us": ..., "p90_us": ..., "cpu_us": ...,
//    "switches": ..., "memory_mib": {...}, "zero": false, "torch": "2.13.0"}
//
// With --backend nccl every rank trains on its GPU, and a step ends when the
// GPU has done it. With --no-ddp as many ranks run at the same time and do not
// communicate; one rank and several threads are what a program without Lockstep
// does. With --trace FILE some further steps are traced, after those that are
// timed.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <lockstep/optim/adam.h>
#include <lockstep/optim/sgd.h>
#include <lockstep/parallel/zero/zero_redundancy_optimizer.h>
#include <lockstep/trace/span.h>
#include <torch/torch.h>
#include <torch/version.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "benchmarks/ddp_step/resources.h"
#include "benchmarks/ddp_step/trace.h"
#include "benchmarks/ddp_step/workloads.h"

namespace {

using benchmarks::Batches, benchmarks::Workload;
using torch::nn::Sequential;
using Clock = std::chrono::steady_clock;
using Optimizer = torch::optim::Optimizer;

constexpr int64_t kTracedSteps = 8;

struct Options {
  std::string model;
  std::string optimizer = "sgd";
  int64_t steps = 100;
  int64_t warmup = 20;
  int64_t batch_size = 0;  // 0 means the model's own
  int threads = 1;
  std::string backend = "lockstep";
  bool no_ddp = false;
  bool zero = false;
  bool unfused = false;
  bool copy_gradients = false;
  std::string trace;
};

using Ddp = lockstep::DistributedDataParallel<Sequential>;

// The model, with or without communication, and its optimizer.
struct Training {
  Sequential module = nullptr;
  std::unique_ptr<Ddp> ddp;  // null means without communication
  std::unique_ptr<Optimizer> optimizer;
  at::Device device = at::kCPU;

  at::Tensor forward(const at::Tensor& data) {
    return ddp ? ddp->forward(data) : module->forward(data);
  }
};

// With `zero` each rank steps a part of the parameters that `training.ddp`
// trains, in the one copy that the ranks share.
template <typename Fused>
std::unique_ptr<Optimizer> make_fused(
    const Training& training, bool zero,
    const typename Fused::Options& fused = {}) {
  if (!zero) {
    return std::make_unique<Fused>(training.module->parameters(), fused);
  }
  return std::make_unique<lockstep::ZeroRedundancyOptimizer<Fused>>(
      *training.ddp, fused,
      lockstep::ZeroRedundancyOptions{.shared_parameters = true});
}

// Returns the optimizer that both sides use, with communication and without:
// LibTorch's fused kernels, or its own classes.
std::unique_ptr<Optimizer> make_optimizer(const Training& training,
                                          const Options& options) {
  namespace optim = lockstep::optim;
  const bool adamw = options.optimizer == "adamw";
  if (options.unfused) {
    const auto parameters = training.module->parameters();
    if (adamw) return std::make_unique<torch::optim::AdamW>(parameters);
    return std::make_unique<torch::optim::SGD>(parameters, 1e-3);
  }
  return adamw ? make_fused<optim::AdamW>(training, options.zero)
               : make_fused<optim::SGD>(training, options.zero, {.lr = 1e-3});
}

Training make_training(const Workload& workload, const Options& options) {
  torch::manual_seed(0);
  Training training;
  training.module = workload.model();
  if (options.backend == "nccl") {
    training.device = lockstep::local_device();
    training.module->to(training.device);
  }
  if (!options.no_ddp) {
    training.ddp = std::make_unique<Ddp>(
        training.module, lockstep::DistributedDataParallelOptions{
                             .place_gradients = !options.copy_gradients});
  }
  training.optimizer = make_optimizer(training, options);
  return training;
}

// Returns the moments before the first step, between the steps and after the
// last.
std::vector<Clock::time_point> run_steps(Training& training, Batches& batches,
                                         const Workload& workload,
                                         int64_t steps) {
  using lockstep::internal::Span;
  std::vector<Clock::time_point> moments;
  moments.reserve(static_cast<size_t>(steps) + 1);
  const bool on_gpu = training.device.is_cuda();
  moments.push_back(Clock::now());
  for (int64_t step = 0; step < steps; ++step) {
    Span loading("train", "load");
    auto batch = batches.next();
    if (on_gpu) {
      batch.data = batch.data.to(training.device);
      batch.target = batch.target.to(training.device);
    }
    loading.end();
    training.optimizer->zero_grad();
    Span forward("train", "forward");
    auto loss = workload.loss(training.forward(batch.data), batch.target);
    forward.end();
    Span backward("train", "backward");
    loss.backward();
    backward.end();
    Span stepping("train", "optimizer");
    training.optimizer->step();
    if (on_gpu) torch::cuda::synchronize();
    stepping.end();
    moments.push_back(Clock::now());
  }
  return moments;
}

// Returns the greatest of all ranks' values, element by element. Collective.
std::vector<int64_t> greatest(const std::vector<int64_t>& values) {
  auto tensor = torch::tensor(values, torch::kInt64)
                    .to(lockstep::default_group()->control_device());
  lockstep::all_reduce(tensor, {.op = lockstep::ReduceOp::MAX});
  tensor = tensor.cpu();
  const auto* data = tensor.const_data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

double rounded(double value, double places) {
  return std::round(value * places) / places;
}

nlohmann::ordered_json step_figures(
    const std::vector<Clock::time_point>& moments) {
  std::vector<int64_t> own;
  for (size_t i = 1; i < moments.size(); ++i) {
    own.push_back(
        std::chrono::nanoseconds(moments[i] - moments[i - 1]).count());
  }
  auto us =
      torch::tensor(greatest(own), torch::kInt64).to(torch::kFloat64) / 1000;
  auto quantiles =
      torch::quantile(us, torch::tensor({0.1, 0.5, 0.9}, torch::kFloat64));
  const auto* at = quantiles.const_data_ptr<double>();
  return {{"median_us", rounded(at[1], 100)},
          {"mean_us", rounded(us.mean().item<double>(), 100)},
          {"p10_us", rounded(at[0], 100)},
          {"p90_us", rounded(at[2], 100)}};
}

// Returns what a step used: of each figure, that of the rank with the most.
// `before` and `after` enclose the timed steps.
nlohmann::ordered_json usage_figures(const benchmarks::Usage& before,
                                     const benchmarks::Usage& after,
                                     int64_t steps) {
  const auto most = greatest(
      {after.cpu_us - before.cpu_us, after.switches - before.switches});
  const auto a_step = [&](int64_t sum) {
    return rounded(static_cast<double>(sum) / static_cast<double>(steps), 10);
  };
  return {{"cpu_us", a_step(most[0])}, {"switches", a_step(most[1])}};
}

nlohmann::ordered_json memory_figures(const benchmarks::Memory& start) {
  lockstep::barrier();  // every rank has made what it shares
  const auto now = benchmarks::memory();
  lockstep::barrier();  // no rank has gone while others count
  const auto kib =
      greatest({start.rss, now.peak_rss, now.rss, now.pss, now.private_rss});
  nlohmann::ordered_json result;
  const char* names[] = {"start_rss", "peak_rss", "rss", "pss", "private"};
  for (size_t i = 0; i < kib.size(); ++i) {
    result[names[i]] = rounded(static_cast<double>(kib[i]) / 1024, 10);
  }
  return result;
}

// Runs some further steps and writes the spans of all ranks to the file `path`.
// Returns what the spans say of communication: the mean over all ranks, for one
// step of one rank.
nlohmann::ordered_json trace_steps(Training& training, Batches& batches,
                                   const Workload& workload,
                                   const std::string& path) {
  auto recorder = std::make_shared<benchmarks::SpanRecorder>(1 << 16);
  lockstep::barrier();
  {
    lockstep::internal::SpanSubscription subscription(recorder);
    run_steps(training, batches, workload, kTracedSteps);
  }
  lockstep::barrier();
  const auto spans = recorder->spans();
  const auto own = benchmarks::overlap(spans);
  auto sums =
      torch::tensor({own.communication_ns, own.hidden_ns, own.waited_ns},
                    torch::kInt64)
          .to(lockstep::default_group()->control_device());
  lockstep::all_reduce(sums);
  sums = sums.cpu();
  const auto ranks = lockstep::gather_object(
      benchmarks::trace_events(spans, lockstep::get_rank()));
  if (lockstep::get_rank() == 0) {
    auto events = nlohmann::json::array();
    for (const auto& rank : ranks) {
      events.insert(events.end(), rank.begin(), rank.end());
    }
    std::ofstream file(path);
    file << nlohmann::json{{"traceEvents", std::move(events)}} << '\n';
    if (!file.flush()) throw std::runtime_error("cannot write " + path);
  }
  const auto* ns = sums.const_data_ptr<int64_t>();
  const auto us_a_step = [&](int64_t sum) {
    return rounded(static_cast<double>(sum) / 1000 / kTracedSteps /
                       lockstep::get_world_size(),
                   10);
  };
  nlohmann::ordered_json result = {{"communication_us", us_a_step(ns[0])},
                                   {"hidden_us", us_a_step(ns[1])},
                                   {"waited_us", us_a_step(ns[2])}};
  if (ns[0] > 0) {
    result["hidden"] =
        rounded(static_cast<double>(ns[1]) / static_cast<double>(ns[0]), 1000);
  }
  return result;
}

void run(Options options) {
  torch::set_num_threads(options.threads);
  auto group = lockstep::init_process_group(options.backend);
  const auto start = benchmarks::memory();
  const auto& workload = benchmarks::workloads().at(options.model);
  if (options.batch_size == 0) options.batch_size = workload.batch_size;
  auto training = make_training(workload, options);
  auto batches = workload.batches(options.batch_size);

  lockstep::barrier();
  run_steps(training, *batches, workload, options.warmup);
  const auto usage_before = benchmarks::usage();
  const auto moments = run_steps(training, *batches, workload, options.steps);
  const auto usage_after = benchmarks::usage();

  int64_t parameters = 0;
  for (const auto& p : training.module->parameters()) parameters += p.numel();
  nlohmann::ordered_json line = {{"peer", "lockstep"},
                                 {"model", options.model},
                                 {"optimizer", options.optimizer},
                                 {"ddp", !options.no_ddp},
                                 {"backend", options.backend},
                                 {"ranks", lockstep::get_world_size()},
                                 {"threads", torch::get_num_threads()},
                                 {"batch_size", options.batch_size},
                                 {"parameters", parameters},
                                 {"steps", options.steps},
                                 {"warmup", options.warmup}};
  line.update(step_figures(moments));
  line.update(usage_figures(usage_before, usage_after, options.steps));
  line["memory_mib"] = memory_figures(start);
  line["zero"] = options.zero;
  line["torch"] = TORCH_VERSION;
  if (!options.trace.empty()) {
    line["trace"] = trace_steps(training, *batches, workload, options.trace);
  }
  if (lockstep::get_rank() == 0) std::printf("%s\n", line.dump().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("training steps with DistributedDataParallel, timed");
  auto positive = CLI::Range(1, 1'000'000);
  app.add_option("--model", options.model)
      ->required()
      ->check(CLI::IsMember(benchmarks::workloads()));
  app.add_option("--optimizer", options.optimizer)
      ->check(CLI::IsMember({"sgd", "adamw"}));
  app.add_option("--steps", options.steps)->check(positive);
  app.add_option("--warmup", options.warmup)->check(CLI::Range(0, 1'000'000));
  app.add_option("--batch-size", options.batch_size,
                 "samples on each rank (default: the model's own)")
      ->check(positive);
  app.add_option("--threads", options.threads, "of a rank's operators")
      ->check(CLI::Range(1, 4096));
  app.add_option("--backend", options.backend);
  auto* no_ddp = app.add_flag("--no-ddp", options.no_ddp,
                              "as many ranks, without communication");
  auto* zero =
      app.add_flag("--zero", options.zero,
                   "each rank steps a part of the parameters, which the ranks "
                   "share (ZeroRedundancyOptimizer)")
          ->excludes(no_ddp);
  app.add_flag("--unfused", options.unfused,
               "torch::optim's classes instead of lockstep::optim's")
      ->excludes(zero);
  app.add_flag("--copy-gradients", options.copy_gradients,
               "DistributedDataParallel with place_gradients = false")
      ->excludes(no_ddp);
  app.add_option("--trace", options.trace,
                 "file for a trace of a few steps more");
  CLI11_PARSE(app, argc, argv);
  try {
    run(options);
    return 0;
  } catch (const c10::Error& error) {  // without LibTorch's stack trace
    std::fprintf(stderr, "ddp_step: %s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ddp_step: %s\n", error.what());
  }
  return 1;
}
