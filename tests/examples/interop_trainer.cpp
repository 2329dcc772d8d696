// The C++ half of a training that Python and C++ ranks do together or continue
// for each other. interop_trainer.py is the other half and describes the
// training. This program's lines begin with "cpp rank".

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "lockstep/base/environment.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_state.h"

namespace {

constexpr int64_t kSamples = 256;
constexpr int64_t kInputs = 20;
constexpr size_t kBatchSize = 16;

torch::Tensor ramp(int64_t size) {
  auto numbers = torch::arange(size, torch::kLong) * 37 % 1009;
  return (numbers - 504).to(torch::kDouble) / 504;
}

torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(kInputs, 32),
                            torch::nn::BatchNorm1d(32), torch::nn::Tanh(),
                            torch::nn::Linear(32, 1));
  torch::NoGradGuard no_grad;
  // net->to(kDouble) would also convert BatchNorm's count of batches, which
  // Python leaves an integer.
  for (auto tensors : {net->parameters(), net->buffers()}) {
    for (auto& tensor : tensors) {
      if (tensor.is_floating_point())
        tensor.set_data(tensor.to(torch::kDouble));
    }
  }
  for (auto& parameter : net->parameters()) {
    parameter.copy_(ramp(parameter.numel()).view_as(parameter) / 4);
  }
  return net;
}

void crash_if_told(const std::string& restart, int rank, int64_t epoch) {
  if (restart == "0" &&
      lockstep::internal::get_env("CRASH_RANK") == std::to_string(rank) &&
      lockstep::internal::get_env("CRASH_EPOCH") == std::to_string(epoch)) {
    ::raise(SIGKILL);
  }
}

void train(int64_t epochs, const std::string& snapshot) {
  auto group = lockstep::init_process_group(
      "cpu:gloo", {.timeout = std::chrono::seconds(30)});
  int rank = lockstep::get_rank();
  auto restart =
      lockstep::internal::get_env("TORCHELASTIC_RESTART_COUNT").value_or("0");
  int64_t first_epoch = 0;
  auto net = make_net();
  torch::optim::SGD optimizer(net->parameters(),
                              torch::optim::SGDOptions(0.05).momentum(0.9));
  // Each rank loads on its own: load_snapshot() is collective, and a Python
  // rank would not take part.
  if (std::filesystem::exists(snapshot)) {
    auto state = lockstep::load_snapshot_file(snapshot);
    lockstep::load_state_dict(*net, state.model_state);
    lockstep::load_state_dict(optimizer, state.optimizer_state.value());
    first_epoch = state.epochs_run + 1;
  }
  lockstep::DistributedDataParallel<torch::nn::Sequential> model(
      net, {.bucket_cap_mb = 0.001});
  lockstep::TensorDataset data(ramp(kSamples * kInputs).view({-1, kInputs}),
                               ramp(kSamples).sin().view({-1, 1}));
  lockstep::DistributedSampler sampler(kSamples, {.seed = 1});
  lockstep::DataLoader loader(data, sampler, {.batch_size = kBatchSize});

  std::printf("cpp rank %d begins at epoch %ld, restart %s\n", rank,
              static_cast<long>(first_epoch), restart.c_str());
  std::fflush(stdout);
  for (int64_t epoch = first_epoch; epoch < epochs; ++epoch) {
    crash_if_told(restart, rank, epoch);
    sampler.set_epoch(epoch);
    for (auto& batch : loader) {
      optimizer.zero_grad();
      torch::mse_loss(model(batch.data), batch.target).backward();
      optimizer.step();
    }
    if (rank == 0) {
      lockstep::save_snapshot_file(
          snapshot, {.model_state = lockstep::state_dict(*net),
                     .optimizer_state = lockstep::state_dict(optimizer),
                     .epochs_run = epoch});
    }
  }
  std::ofstream file("final-" + std::to_string(rank) + ".bin",
                     std::ios::binary);
  for (const auto& parameter : net->parameters()) {
    auto flat = parameter.detach().contiguous();
    file.write(static_cast<const char*>(flat.data_ptr()),
               static_cast<std::streamsize>(flat.nbytes()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    train(std::stol(argv[1]), argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "interop_trainer: %s\n", error.what());
    return 1;
  }
}
