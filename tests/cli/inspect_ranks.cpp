// Ranks for inspect_ranks_test.cpp, which diverge, and for jobs_test.cpp and
// hangs_test.cpp:
// `lockstep run --nproc-per-node=3 inspect_ranks absent|stuck|different|train`.
// With "train", the ranks train until they are ended, and mostly sleep. With
// "finite", a batch size and a file, they train 20 batches, log the loss to the
// file, and end; with a fourth argument the loss is NaN. With
// "late", rank 1 is late for each of many collectives. With "crash" and
// one of segv, abort, overflow, thread and throw, rank 1 ends so. With
// "crossed", each rank waits for a message of the next one, and none sends.
// With "once", rank 1 does not come in the first attempt, and all end in the
// second. With "left", the ranks work for some time, destroy their group and
// stay. Each rank prints "ready <rank> <pid>" when it has come to the point
// that the test needs, or "failed <rank> <error>", and stays until it is
// killed, a minute at most.
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/tensor_dataset.h"
#include "lockstep/observe/metrics_logger.h"
#include "lockstep/observe/profiler.h"
#include "lockstep/observe/progress_bar.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

void say_ready(int rank) {
  std::printf("ready %d %d\n", rank, static_cast<int>(::getpid()));
  std::fflush(stdout);
}

void stay() { std::this_thread::sleep_for(seconds(60)); }

// Its name must be in the stack.
extern "C" void crash_here(volatile int* place) { *place = 1; }

extern "C" int overflow_here(int depth) {
  volatile char bytes[4096];
  bytes[0] = static_cast<char>(depth);
  if (depth < 0) return 0;
  return overflow_here(depth + 1) + bytes[0];
}

constexpr int64_t kSamples = 64;

// Steps of 4 samples that take some 5 ms each.
void train(int rank) {
  torch::nn::Linear module(8, 1);
  lockstep::DistributedDataParallel<torch::nn::Linear> model(module);
  torch::optim::SGD optimizer(module->parameters(), 0.01);
  lockstep::TensorDataset dataset(torch::ones({kSamples, 8}),
                                  torch::ones({kSamples, 1}));
  lockstep::DistributedSampler sampler(kSamples);
  lockstep::DataLoader loader(dataset, sampler, {.batch_size = 4});
  for (int epoch = 0;; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : loader) {
      optimizer.zero_grad();
      const auto loss =
          torch::mse_loss(model.forward(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      std::this_thread::sleep_for(milliseconds(5));
    }
    if (epoch == 0) say_ready(rank);
  }
}

// Its loss is 1 / step, or NaN.
void train_to_the_end(int64_t batch_size, const std::string& log, bool nan) {
  constexpr int64_t kBatches = 20;
  const int64_t samples = kBatches * batch_size * lockstep::get_world_size();
  lockstep::TensorDataset dataset(torch::ones({samples, 8}),
                                  torch::ones({samples, 1}));
  lockstep::DistributedSampler sampler(samples);
  lockstep::DataLoader loader(dataset, sampler, {.batch_size = batch_size});
  lockstep::MetricsLogger metrics(log, {.overwrite = true});
  int64_t step = 0;
  for ([[maybe_unused]] auto& batch : loader) {
    std::this_thread::sleep_for(milliseconds(5));
    ++step;
    const double loss = 1.0 / static_cast<double>(step);
    metrics.log({{"loss", nan ? std::nan("") : loss}}, step);
  }
}

[[noreturn]] void crash(const std::string& how) {
  if (how == "segv") crash_here(nullptr);
  if (how == "overflow") overflow_here(0);
  if (how == "thread") std::thread([] { crash_here(nullptr); }).join();
  if (how == "throw") throw std::runtime_error("thrown by rank 1");
  std::abort();
}

}  // namespace

int main(int, char** argv) {
  const std::string mode = argv[1];
  auto group = lockstep::init_process_group(
      "gloo", {.timeout = seconds(50), .check_calls = mode == "different"});
  const int rank = lockstep::get_rank();
  auto tensor = torch::ones({1000});
  lockstep::all_reduce(tensor);
  if (mode == "finite") {
    train_to_the_end(std::stol(argv[2]), argv[3], argv[4] != nullptr);
    return 0;
  }
  if (mode == "train") train(rank);
  if (mode == "late") {
    say_ready(rank);
    lockstep::ProgressBar bar(1'000, {.line_interval = milliseconds(100)});
    for (int i = 0; i < 1'000; ++i) {
      if (rank == 1) std::this_thread::sleep_for(milliseconds(20));
      lockstep::all_reduce(tensor);
      bar.update();
    }
  }
  if (mode == "crash") {
    if (rank == 1) crash(argv[2]);
    stay();
  }
  if (mode == "crossed") {
    say_ready(rank);
    lockstep::recv(tensor, (rank + 1) % lockstep::get_world_size());
  }
  const char* const attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
  if (mode == "once" && attempt != nullptr && std::string(attempt) != "0") {
    return 0;
  }
  const int other = mode == "absent" ? 2 : 1;
  try {
    if (mode == "different" && rank == other) {
      lockstep::broadcast(tensor, 0);
    } else if (rank == other) {
      say_ready(rank);
      stay();
    } else {
      if (mode == "stuck") say_ready(rank);
      lockstep::all_reduce(
          tensor,
          {.timeout = mode == "absent" ? std::optional(milliseconds(500))
                                       : std::nullopt});
    }
  } catch (const std::exception& error) {
    std::printf("failed %d %s\n", rank, error.what());
    std::fflush(stdout);
    stay();
  }
  ::_exit(0);
}
