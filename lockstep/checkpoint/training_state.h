#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/comm/process_group.h"

// Snapshots of a training run on all its ranks:
//
//   lockstep::TrainingState state{.model = model.ptr(),
//                                 .optimizer = &optimizer};
//   lockstep::load_snapshot("snapshot.pt", state);
//   for (int64_t epoch = state.next_epoch(); epoch < epochs; ++epoch) {
//     ... train ...
//     state.epochs_run = epoch;
//     lockstep::save_snapshot("snapshot.pt", state);
//   }
//
// In the middle of an epoch, with a sampler that knows its position:
//
//   state.sampler_state = sampler.state_dict();      // before saving
//   sampler.load_state_dict(state.sampler_state);    // after loading
namespace lockstep {

// What a snapshot is made from and restored into. Model and optimizer must
// outlive the calls; the numbers are read when saving, written when loading.
struct TrainingState {
  // The module itself, not its DistributedDataParallel: names have no
  // "module." prefix.
  std::shared_ptr<torch::nn::Module> model{};
  // None: the model alone.
  torch::optim::Optimizer* optimizer{nullptr};
  // The last epoch that has ended, counted from 0; -1 before the first has.
  int64_t epochs_run{-1};
  // Optimizer steps since the beginning of training.
  int64_t step{0};
  // Empty between two epochs.
  SamplerState sampler_state{};
  std::map<std::string, std::string> metadata{};

  // The epoch to begin or to go on with.
  int64_t next_epoch() const { return epochs_run + 1; }
};

struct SnapshotOptions {
  // None: the default group; where none is initialised, this process alone.
  ProcessGroupPtr group{};
};

struct LoadSnapshotOptions {
  // As SnapshotOptions::group.
  ProcessGroupPtr group{};
  // Whether this run will save under the same path. If so, a folder that is
  // missing or that rank 0 cannot write to, and an optimizer that no snapshot
  // holds, is an error now, not at the first save. False for a run that only
  // reads.
  bool will_save{true};
};

// Collective. The group's first rank writes `path` (snapshot.h: format by name,
// replaced as a whole, on the disk when this returns); model, optimizer and
// numbers are its own, the state of the default CPU generator is each rank's.
//
// Blocks until the file is written, on every rank, within the group's timeout.
// If it is not written, every rank throws: the first what happened to it
// (snapshot.h), the others a SnapshotError with its words. The old file is
// kept, and training may go on.
void save_snapshot(const std::string& path, const TrainingState& state,
                   const SnapshotOptions& options = {});

// Collective. Every rank reads `path` and restores itself; false, and nothing
// changed, if no rank has such a file. Parameters and buffers are written in
// place, so that buckets and other aliases of them stay valid.
//
// A file without optimizer state (the Python tutorial's) leaves the optimizer
// as it is. Generators: if the snapshot was saved by as many ranks, each takes
// its own state; otherwise rank r is seeded from the saved state of rank 0 and
// r, so that all differ and the same resume draws the same numbers; without
// saved states they are left as they are.
//
// Throws, on every rank and before any of them has changed anything: if
// nothing can be saved under `path` (LoadSnapshotOptions::will_save), if one
// rank cannot read the file or it does not fit its model or optimizer (that
// rank throws the errors of snapshot.h, module_state.h, optimizer_state.h, the
// others a SnapshotError that names it), if the file is on some ranks only or
// not the same on all.
bool load_snapshot(const std::string& path, TrainingState& state,
                   const LoadSnapshotOptions& options = {});

}  // namespace lockstep
