#pragma once

#include <functional>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "examples/ddp_tutorial/job.h"

namespace examples {

// Trains the model of the tutorial: Linear(20, 1) with SGD on this rank's part
// of 2,048 random samples, which are the same for every rank and run. Without a
// process group this rank's part is all of them.
class Trainer {
 public:
  // `rank` is printed beside the device: "[CPU0]". The device is
  // lockstep::local_device().
  Trainer(const Job& job, int rank);
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  torch::nn::Linear& layer() { return layer_; }
  torch::optim::SGD& optimizer() { return optimizer_; }

  // Makes one pass over the samples, through `model`: layer(), or a wrapper of
  // it. Returns the number of steps.
  int64_t run_epoch(
      int64_t epoch,
      const std::function<torch::Tensor(const torch::Tensor&)>& model);

 private:
  const Job job_;
  torch::Device device_;
  std::string name_;
  lockstep::TensorDataset dataset_;
  lockstep::DistributedSampler sampler_;
  lockstep::DataLoader<lockstep::TensorDataset> loader_;
  torch::nn::Linear layer_;
  torch::optim::SGD optimizer_;
};

// Writes the model's state_dict to checkpoint.pt and says so. Only one rank may
// call it.
void save_checkpoint(int64_t epoch, const torch::nn::Module& model);

// Trains, resuming from the snapshot if there is one, and saves a snapshot
// every `job.save_every` epochs. Every rank calls it. `rank` is as for Trainer.
void train_with_snapshots(const Job& job, int rank);

}  // namespace examples
