#pragma once

#include <functional>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "examples/ddp_tutorial/job.h"

namespace examples {

// What the programs of the tutorial train, and how: Linear(20, 1) with SGD on
// this rank's part of 2,048 random samples, the same for every rank and run.
// Where there is no process group, this rank's part is all of them.
class Trainer {
 public:
  // `rank` is printed beside the device: "[CPU0]". The device is
  // lockstep::local_device().
  Trainer(const Job& job, int rank);
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  torch::nn::Linear& layer() { return layer_; }
  torch::optim::SGD& optimizer() { return optimizer_; }

  // One pass over the samples, through `model`: layer(), or what wraps it.
  // Returns the number of steps.
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

// Writes checkpoint.pt, the model's state_dict, and says so. One rank calls it.
void save_checkpoint(int64_t epoch, const torch::nn::Module& model);

// Goes on from the snapshot where there is one and saves it every
// `job.save_every` epochs; all ranks together. `rank` as for Trainer.
void train_with_snapshots(const Job& job, int rank);

}  // namespace examples
