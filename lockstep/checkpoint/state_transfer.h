#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/process_group.h"

// The state of a training as a Snapshot in memory, and its way from one rank to
// another.
namespace lockstep::internal {

// Returns what one rank's training has, which must be whole: without
// generators; without `objects`, only model, optimizer and items that are
// modules or optimizers. The tensors share their memory with those of the
// training.
Snapshot snapshot_of_training(const TrainingState& state, bool objects);

// Every check for restoring model, optimizer, scheduler and items from a
// snapshot, and then what restores them. Numbers and generators are left alone.
class TrainingLoad {
 public:
  // The objects of `state` must outlive this one. `adopt`: as of
  // OptimizerLoad. Throws std::invalid_argument, and changes nothing.
  TrainingLoad(const Snapshot& snapshot, const TrainingState& state,
               bool adopt = false);

  // Restores model, optimizer and scheduler.
  void apply();
  // Restores the other items, whose own functions may throw.
  void apply_items();

 private:
  std::shared_ptr<torch::nn::Module> model_;
  NamedTensors model_state_;
  std::unique_ptr<OptimizerLoad> optimizer_{};
  std::function<void()> scheduler_{};
  std::vector<std::function<void()>> items_{};
};

// Sends `snapshot` to rank `to` of the default group, which must call
// receive_snapshot(). Tensors go one by one, from the memory where they are.
// Throws std::invalid_argument for what a safetensors file cannot hold, and
// c10::DistBackendError.
void send_snapshot(const Snapshot& snapshot, int to);
// Returns a snapshot with tensors of its own.
Snapshot receive_snapshot(int from);

}  // namespace lockstep::internal
