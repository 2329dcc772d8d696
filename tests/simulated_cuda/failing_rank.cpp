// One rank of a job on simulated GPUs in which the rank `odd` fails:
// `simgpu_failing_rank SCENARIO nccl [NAME=N]`, with the environment of a rank.
// The ranks train a wrapped network. It prints
//
//   ready R         it has made three iterations
//   failed R TEXT   what it threw; it leaves the group by this exception, and
//                   ends with 1
//   done R          it has made ten iterations
//
// Scenarios:
//
//   trains   all ranks train until they are killed
//   throws   `odd` throws after a forward
//   stands   `odd` makes no more iterations, in the first attempt of the job
//
// More arguments: `timeout` of the group in ms (300,000).

#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/faults/rank_report.h"

namespace lockstep::internal::testing {
namespace {

constexpr int kReady = 3;

bool is_first_attempt() {
  const char* const count = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return count == nullptr || std::string(count) == "0";
}

void train(const std::string& scenario, bool odd) {
  const auto device = local_device();
  torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::Tanh(),
                            torch::nn::Linear(16, 2));
  net->to(device);
  DistributedDataParallel<torch::nn::Sequential> model(net);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  for (int step = 0; scenario == "trains" || step < 10; ++step) {
    if (step == kReady) {
      say("ready");
      if (odd && scenario == "stands" && is_first_attempt()) ::pause();
    }
    optimizer.zero_grad();
    const auto loss = model(torch::ones({4, 8}, device)).square().mean();
    if (odd && step == kReady && scenario == "throws") {
      throw std::runtime_error("no such file: numbers.csv");
    }
    loss.backward();
    optimizer.step();
    // As a loop does that prints its loss: the host waits for the device.
    (void)loss.item<float>();
  }
  say("done");
}

}  // namespace

int run(const std::string& scenario, const std::string& backend,
        const Arguments& given) {
  try {
    const auto group = init_process_group(
        backend,
        {.timeout = std::chrono::milliseconds(given.get("timeout", 300'000))});
    train(scenario, own_rank() == given.get("odd", -1));
  } catch (const std::exception& error) {
    say("failed", one_line(error));
    return 1;
  }
  return 0;
}

}  // namespace lockstep::internal::testing
