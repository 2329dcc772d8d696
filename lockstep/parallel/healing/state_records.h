#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/parallel/healing/place_record.h"

namespace lockstep::internal {

// Returns whether this rank has state that no other rank has: parts of tensors
// (tensor_layout.h), a part of an optimizer's state, an optimizer that steps on
// each rank by itself, items that are per_rank().
bool is_divided(const TrainingState& state);

// Returns what a rank gives to one that takes its state: all but the samplers,
// which belong to the loop, and the generators. The tensors are those of
// `state`.
Snapshot without_samplers(const TrainingState& state);

// The whole state of this rank in the memory of its place, as it was after the
// last steps: parameters, buffers, optimizers, scheduler, items and generators;
// not the samplers, which belong to the loop. For one thread.
class StateRecords {
 public:
  static constexpr size_t kSlots = 2;

  // Uses kSlots slots of the memory, from `first` on (place_record.h). Both
  // references must outlive this object.
  StateRecords(const FileDescriptor& memory, size_t first,
               TrainingState& state);

  // Copies the state, which is that after `steps` steps. The record of
  // `steps` - 1 stays, and all others are forgotten. Throws what
  // PlaceRecord::write() throws, and std::invalid_argument for what a
  // safetensors file cannot hold.
  void write(int64_t steps);

  PlaceRecord& records() { return record_; }

  // Returns after which steps this rank can have its state again.
  std::vector<int64_t> steps() const { return record_.steps(); }

  // Gives the training the state that it had after `steps` steps, and forgets
  // later ones. The numbers of TrainingState are left alone, and are in the
  // result. Throws std::runtime_error if the record is damaged, or the training
  // has another state afterwards; std::invalid_argument if the process that
  // wrote it had another model or other items.
  Snapshot load(int64_t steps);

 private:
  TrainingState& state_;
  PlaceRecord record_;
};

}  // namespace lockstep::internal
