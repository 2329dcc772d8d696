#include "examples/ddp_tutorial/trainer.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

namespace examples {
namespace {

lockstep::TensorDataset make_dataset() {
  // The dataset is the same on every rank; each rank loads its own part of it.
  torch::manual_seed(0);
  return {torch::rand({2048, 20}), torch::rand({2048, 1})};
}

}  // namespace

Trainer::Trainer(const Job& job, int rank)
    : job_(job),
      device_(lockstep::local_device()),
      name_((device_.is_cuda() ? "GPU" : "CPU") + std::to_string(rank)),
      dataset_(make_dataset()),
      sampler_(static_cast<int64_t>(dataset_.size())),
      loader_(dataset_, sampler_, {.batch_size = job.batch_size}),
      layer_(20, 1),
      optimizer_(layer_->parameters(), /*lr=*/1e-3) {
  layer_->to(device_);
}

int64_t Trainer::run_epoch(
    int64_t epoch,
    const std::function<torch::Tensor(const torch::Tensor&)>& model) {
  std::printf("[%s] Epoch %ld | Batchsize: %ld | Steps: %ld\n", name_.c_str(),
              static_cast<long>(epoch),
              static_cast<long>(std::min(job_.batch_size, sampler_.size())),
              static_cast<long>(loader_.size()));
  std::fflush(stdout);
  sampler_.set_epoch(epoch);
  for (auto& batch : loader_) {
    optimizer_.zero_grad();
    auto output = model(batch.data.to(device_));
    auto target = batch.target.to(device_);
    auto loss = job_.loss == "mse"
                    ? torch::mse_loss(output, target)
                    : torch::nn::functional::cross_entropy(output, target);
    loss.backward();
    optimizer_.step();
  }
  return loader_.size();
}

void save_checkpoint(int64_t epoch, const torch::nn::Module& model) {
  lockstep::save_model("checkpoint.pt", model);
  std::printf("Epoch %ld | Training checkpoint saved at checkpoint.pt\n",
              static_cast<long>(epoch));
  std::fflush(stdout);
}

void train_with_snapshots(const Job& job, int rank) {
  Trainer trainer(job, rank);
  lockstep::TrainingState state{.model = trainer.layer().ptr(),
                                .optimizer = &trainer.optimizer()};
  if (std::filesystem::exists(job.snapshot)) std::printf("Loading snapshot\n");
  if (lockstep::load_snapshot(job.snapshot, state)) {
    std::printf("Resuming training from snapshot at Epoch %ld\n",
                static_cast<long>(state.next_epoch()));
  }
  std::fflush(stdout);

  lockstep::DistributedDataParallel<torch::nn::Linear> model(trainer.layer());
  for (int64_t epoch = state.next_epoch(); epoch < job.total_epochs; ++epoch) {
    state.step += trainer.run_epoch(epoch, std::ref(model));
    state.epochs_run = epoch;
    if (epoch % job.save_every != 0) continue;
    lockstep::save_snapshot(job.snapshot, state);
    if (lockstep::get_rank() != 0) continue;
    std::printf("Epoch %ld | Training snapshot saved at %s\n",
                static_cast<long>(epoch), job.snapshot.c_str());
    std::fflush(stdout);
  }
}

}  // namespace examples
