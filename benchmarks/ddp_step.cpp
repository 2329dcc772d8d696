// The training steps of `./dev bench`: what peers/ddp_peer.py does in Python,
// here with LibTorch and Lockstep.
//
//   build/bin/lockstep run --standalone --nproc-per-node=2
//       build/bin/benchmarks/ddp_step --model mlp
//
// Every rank trains the same model on its own fixed random tensors (no
// loader): zero_grad, forward, mean squared error, backward, SGD step, on one
// thread. A step takes as long as it took the slowest rank. Rank 0 prints one
// line of JSON (docs/benchmarks.md), the peer's and the version of LibTorch:
//
//   {"peer": "lockstep", "model": "mlp", "ddp": true, "backend": "lockstep",
//    "ranks": 2, "batch_size": 32, "parameters": 4241409, "steps": 100,
//    "warmup": 20, "median_us": ..., "p10_us": ..., "p90_us": ...,
//    "torch": "2.13.0"}
//
// With --no-ddp as many ranks run at the same time and do not communicate.

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <torch/version.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

struct Options {
  std::string model;
  int64_t steps = 100;
  int64_t warmup = 20;
  int64_t batch_size = 32;
  std::string backend = "lockstep";
  bool no_ddp = false;
};

// What one model was measured with: nanoseconds of each step on this rank.
struct Measurement {
  std::vector<int64_t> step_ns;
  int64_t parameters = 0;
};

template <typename Model>
std::vector<int64_t> time_steps(Model& model,
                                std::vector<at::Tensor> parameters,
                                const at::Tensor& data,
                                const at::Tensor& target, int64_t steps) {
  using Clock = std::chrono::steady_clock;
  torch::optim::SGD optimizer(std::move(parameters), /*lr=*/1e-3);
  torch::nn::MSELoss criterion;
  std::vector<int64_t> times(static_cast<size_t>(steps));
  for (auto& time : times) {
    auto begin = Clock::now();
    optimizer.zero_grad();
    criterion(model->forward(data), target).backward();
    optimizer.step();
    time = std::chrono::nanoseconds(Clock::now() - begin).count();
  }
  return times;
}

template <typename Module>
Measurement measure(Module module, int64_t features, int64_t outputs,
                    const Options& options) {
  torch::manual_seed(1 + lockstep::get_rank());
  auto data = torch::randn({options.batch_size, features});
  auto target = torch::randn({options.batch_size, outputs});
  auto parameters = module->parameters();
  Measurement result;
  for (const auto& p : parameters) result.parameters += p.numel();
  auto steps = options.warmup + options.steps;
  if (options.no_ddp) {
    lockstep::barrier();
    result.step_ns = time_steps(module, parameters, data, target, steps);
  } else {
    auto ddp =
        std::make_unique<lockstep::DistributedDataParallel<Module>>(module);
    lockstep::barrier();
    result.step_ns = time_steps(ddp, parameters, data, target, steps);
  }
  result.step_ns.erase(result.step_ns.begin(),
                       result.step_ns.begin() + options.warmup);
  return result;
}

Measurement measure_tutorial(const Options& options) {
  return measure(torch::nn::Linear(20, 1), 20, 1, options);
}

Measurement measure_mlp(const Options& options) {
  using torch::nn::Linear, torch::nn::ReLU;
  torch::nn::Sequential model(Linear(20, 2048), ReLU(), Linear(2048, 2048),
                              ReLU(), Linear(2048, 1));
  return measure(model, 20, 1, options);
}

// 66 layers of 64: many small parameters.
Measurement measure_narrow(const Options& options) {
  torch::nn::Sequential model;
  for (int layer = 0; layer < 66; ++layer) {
    model->push_back(torch::nn::Linear(64, 64));
    model->push_back(torch::nn::ReLU());
  }
  return measure(model, 64, 64, options);
}

const std::map<std::string, Measurement (*)(const Options&)> kModels = {
    {"tutorial", measure_tutorial},
    {"mlp", measure_mlp},
    {"narrow", measure_narrow},
};

double hundredth(double value) { return std::round(value * 100) / 100; }

// Collective: the slowest rank of each step, summed up on rank 0.
void report(const Measurement& measured, const Options& options) {
  auto times = torch::tensor(measured.step_ns, torch::kInt64);
  lockstep::all_reduce(times, {.op = lockstep::ReduceOp::MAX});
  if (lockstep::get_rank() != 0) return;
  auto quantiles =
      torch::quantile(times.to(torch::kFloat64) / 1000,
                      torch::tensor({0.1, 0.5, 0.9}, torch::kFloat64));
  const double* us = quantiles.const_data_ptr<double>();
  nlohmann::ordered_json line = {{"peer", "lockstep"},
                                 {"model", options.model},
                                 {"ddp", !options.no_ddp},
                                 {"backend", options.backend},
                                 {"ranks", lockstep::get_world_size()},
                                 {"batch_size", options.batch_size},
                                 {"parameters", measured.parameters},
                                 {"steps", options.steps},
                                 {"warmup", options.warmup},
                                 {"median_us", hundredth(us[1])},
                                 {"p10_us", hundredth(us[0])},
                                 {"p90_us", hundredth(us[2])},
                                 {"torch", TORCH_VERSION}};
  std::printf("%s\n", line.dump().c_str());
}

void run(const Options& options) {
  torch::set_num_threads(1);
  auto group = lockstep::init_process_group(options.backend);
  torch::manual_seed(0);
  report(kModels.at(options.model)(options), options);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("training steps with DistributedDataParallel, timed");
  auto positive = CLI::Range(1, 1'000'000);
  app.add_option("--model", options.model)
      ->required()
      ->check(CLI::IsMember(kModels));
  app.add_option("--steps", options.steps)->check(positive);
  app.add_option("--warmup", options.warmup)->check(CLI::Range(0, 1'000'000));
  app.add_option("--batch-size", options.batch_size, "samples on each rank")
      ->check(positive);
  app.add_option("--backend", options.backend);
  app.add_flag("--no-ddp", options.no_ddp,
               "as many ranks, without communication");
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
