#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/comm/process_group.h"

// The state of a training as a Snapshot in memory, and its way from one rank to
// another.
namespace lockstep::internal {

// Returns what this rank's training has: without generators; without `objects`,
// only model, optimizer and items that are modules or optimizers. Of what is
// divided over the ranks it is this rank's part, which only a TrainingLoad of
// this rank can restore. The tensors share their memory with those of the
// training.
Snapshot snapshot_of_training(const TrainingState& state, bool objects);

// Every check for restoring model, optimizer, scheduler and items from a
// snapshot, and then what restores them. Numbers and generators are left alone.
class TrainingLoad {
 public:
  // The objects of `state` must outlive this one. `own`: whether the snapshot
  // is one of snapshot_of_training(), whose tensors may become those of the
  // optimizer, and whose parts are those of this rank. Throws
  // std::invalid_argument, and changes nothing.
  TrainingLoad(const Snapshot& snapshot, const TrainingState& state,
               bool own = false);

  // Restores model, optimizer and scheduler.
  void apply();
  // Restores the other items, whose own functions may throw.
  void apply_items();

 private:
  std::shared_ptr<torch::nn::Module> model_;
  NamedTensors model_state_;
  std::unique_ptr<PreparedOptimizer> optimizer_{};
  std::function<void()> scheduler_{};
  std::vector<std::function<void()>> items_{};
};

// A snapshot as a text and the values of tensors, which are on the CPU and
// contiguous.
struct PackedSnapshot {
  std::string text;
  std::vector<at::Tensor> tensors;
};
// Tensors are not copied unless they have another form. Throws
// std::invalid_argument for what a safetensors file cannot hold.
PackedSnapshot pack(const Snapshot& snapshot);
// Returns the snapshot with this text. `fill` gives each new tensor its values,
// in the order of PackedSnapshot::tensors.
Snapshot unpack(const std::string& text,
                const std::function<void(at::Tensor& tensor)>& fill);

// Sends `snapshot` to rank `to` of the default group, which must call
// receive_snapshot(). Tensors go one by one, from the memory where they are.
// Throws what pack() throws, and c10::DistBackendError.
void send_snapshot(const Snapshot& snapshot, int to);
// Returns a snapshot with tensors of its own.
Snapshot receive_snapshot(int from);

}  // namespace lockstep::internal
