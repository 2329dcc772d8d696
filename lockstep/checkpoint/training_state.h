#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/checkpoint/state_item.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/state/resumable_scheduler.h"

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
// A path that ends in "/", has no extension or is an existing directory is a
// folder of snapshots: each save adds one, of which every rank writes a part,
// and a sharded optimizer's state is neither collected nor tied to the number
// of ranks. A file (.pt, .pth, .safetensors) is written by the first rank. Any
// other extension is an error.
//
//   lockstep::save_snapshot("snapshots/", state, {.keep_last = 3});
//
// In the middle of an epoch the sampler's position is saved, too:
//
//   state.sampler_state = sampler.state_dict();      // before saving
//   sampler.load_state_dict(state.sampler_state);    // after loading
namespace lockstep {

// The parts of a training run that a snapshot saves and restores. Model,
// optimizer and scheduler must outlive the calls; saving reads the numbers,
// loading writes them.
struct TrainingState {
  // The module itself, not its DistributedDataParallel, so that names have no
  // "module." prefix.
  std::shared_ptr<torch::nn::Module> model{};
  // If it is null, only the model is saved and restored. A
  // ZeroRedundancyOptimizer needs a folder of snapshots.
  torch::optim::Optimizer* optimizer{nullptr};
  // The learning-rate scheduler of this optimizer, which needs `optimizer` to
  // be set, too. If it is null, no scheduler is saved and restored.
  ResumableScheduler* scheduler{nullptr};
  // The last epoch that has ended, counted from 0; -1 before the first has
  // ended.
  int64_t epochs_run{-1};
  // Optimizer steps since the beginning of training.
  int64_t step{0};
  // The sampler's state_dict(); empty between two epochs.
  SamplerState sampler_state{};
  std::map<std::string, std::string> metadata{};

  // Everything else, by name (state_item.h): further models and optimizers, an
  // average of the weights, a GradScaler, the sampler, metrics, your own. A
  // name has no dot, and is not "model", "optimizer" or "lockstep".
  //
  //   .items = {{"ema", average}, {"scaler", scaler}, {"sampler", sampler}}
  std::map<std::string, StateItem> items{};

  // The epoch to start or to resume.
  int64_t next_epoch() const { return epochs_run + 1; }
};

struct SnapshotOptions {
  // The ranks that save together. Most programs leave it. Null means the
  // default group, or this process alone if there is none.
  ProcessGroupPtr group{};

  // The next two are for folders. How many of the newest snapshots stay after a
  // save; older ones are removed. With 2 or more there is another one if the
  // newest is damaged later: one of another step, because a snapshot that is
  // repeated at the same step takes the place of the one before it. 0 means
  // that all stay.
  int64_t keep_last{0};

  // Snapshots whose TrainingState::step is a multiple of this number stay, too.
  // 0 means that none does.
  int64_t keep_every{0};
};

struct LoadSnapshotOptions {
  // ---- Behaviour ----

  // As SnapshotOptions::group.
  ProcessGroupPtr group{};

  // Whether this run will save to the same path. If so, what a save would
  // refuse is an error now, not at the first save: a folder that is missing or
  // that rank 0 cannot write to, one that is itself a snapshot or holds weights
  // and no snapshots; an optimizer that snapshots cannot hold, a name or dtype
  // that the format lacks; ranks that have other items, shapes or optimizers
  // than the others and cannot save together (in a file, only items and shapes
  // are compared). A folder of snapshots is made. Set it to false for a run
  // that only reads.
  bool will_save{true};

  // ---- Performance ----

  // Whether the checksums of everything that this rank reads are compared
  // before the first change. Set it to false if a folder was verified already
  // (verify_snapshot()) and reading twice takes too long. Files are always
  // verified.
  bool verify{true};
};

// The result of load_snapshot(); true if it has loaded something.
struct LoadedSnapshot {
  bool found{false};
  // The file, or the folder of the one snapshot, that was loaded.
  std::string path{};
  // The errors of the snapshots in the folder that are newer than the
  // loaded one, newest first; one line each, which names file and tensor. Tell
  // the user if it is not empty: the steps since the loaded snapshot are done
  // again.
  std::vector<std::string> skipped{};
  // The parts that were restored: "model", "optimizer", "scheduler",
  // "generator", and names of items; and the parts that the run has and the
  // snapshot lacks, which kept their values: also "epochs_run", "step",
  // "sampler_state" and, if the run has some, "metadata", which files of
  // Lockstep have, and those of other programs may lack; and what the snapshot
  // has and the run lacks. If the run will save, rank 0 also warns (TORCH_WARN)
  // of the last two, because such a run does not go on as it would have, or
  // because its next snapshot lacks a part.
  std::vector<std::string> restored{};
  std::vector<std::string> not_restored{};
  std::vector<std::string> not_used{};

  explicit operator bool() const { return found; }
};

// Collective. The group's first rank, which must have the whole model, writes
// `path` (snapshot.h: the name chooses the format; the file is replaced as a
// whole, and is on the disk when this returns). The optimizer's state has the
// names of the parameters in the model. Model, optimizer, scheduler and
// numbers are those of the first rank; the states of the default generators, of
// the CPU and of the devices on which the model is, are saved for each rank.
// The other ranks' parameters and optimizer state, as far as they have them,
// are compared with those of the first rank, as in a folder. All ranks that set
// TrainingState::model must have the same items.
//
// If `path` is a folder, all ranks must see it. A new snapshot appears in it,
// as a whole, when everything is on the disk. Parameters and optimizer state
// must be equal on all ranks, as they are with DistributedDataParallel, or
// parts of larger ones (FSDP, tensor parallelism), of which the snapshot has
// the whole: each rank writes a part from its own memory. What several ranks
// have is compared before the snapshot appears: if ranks have different values
// of a tensor, of which the snapshot would be a mixture, std::invalid_argument
// on every rank names it and two of the ranks. Ranks' models may lack tensors
// that those of others have (the stages of a pipeline): the snapshot has all.
// Stages whose parameters have the same names, and are not one tied weight, are
// refused with std::invalid_argument on every rank, here and by
// load_snapshot(); here also stages that have buffers of the same names with
// different values. Numbers are those of the first rank, a buffer is that of
// the first rank that has it. docs/internals/snapshot-formats.md describes the
// files, which PyTorch's distributed checkpoint reads.
//
// Blocks on every rank until the files are written, within the group's timeout.
// Returns the path of what was written: `path`, or the snapshot in that folder.
// If writing fails on a rank, every rank throws: that rank its own error
// (snapshot.h), the others one that quotes it, which is a SnapshotError, or
// std::invalid_argument if that rank's is one. The older snapshots are kept,
// and training may go on.
std::string save_snapshot(const std::string& path, const TrainingState& state,
                          const SnapshotOptions& options = {});

// Collective. Every rank reads `path` and restores itself. Returns false, and
// changes nothing, if no rank has such a file. Parameters and buffers are
// written in place, so that buckets and other aliases of them stay valid.
//
// If `path` is a folder, it is one of snapshots, of which the newest is loaded
// that is not damaged (LoadedSnapshot::skipped names the others; weights that
// are in the folder, too, are not looked at); or one snapshot; or a folder of
// PyTorch's distributed checkpoint, in safetensors.
// Any number of ranks may load it, however their models are divided; each reads
// only what it needs, and straight into the tensors. A rank's model may lack
// tensors of the snapshot that the model of another rank has.
//
// The optimizer's parameters are found by their names in the model, in whatever
// order they are. A file of Python may have no such names, only numbers; it is
// refused if the model has its parameters in another order than the file.
//
// If the snapshot lacks a part (the Python tutorial's lacks optimizer state and
// `step`), the run's stays unchanged; LoadedSnapshot tells, and rank 0 warns. A
// file may have parts that the run does not have and that cannot be read.
// Generators: if the snapshot was saved by the same number of ranks, each rank
// takes its own state. Otherwise rank r is seeded from rank 0's saved state and
// r, so that all ranks differ and a repeated resume draws the same numbers. A
// snapshot without saved states leaves generators unchanged.
//
// Throws, on every rank and before any rank has changed anything: if nothing
// can be saved under `path` (LoadSnapshotOptions::will_save); if one rank
// cannot read the file, or the file does not fit that rank's model, optimizer
// or scheduler (that rank throws the errors of snapshot.h, module_state.h,
// optimizer_state.h, resumable_scheduler.h, the others a SnapshotError that
// names the rank); if the file is missing on some ranks only, or is not the
// same on all. A folder of snapshots throws for damage only if no snapshot in
// it can be loaded.
//
// In a process that takes the place of a rank that died (HealedTraining) this
// loads nothing, and returns as if there were no file: the state comes from the
// other ranks.
LoadedSnapshot load_snapshot(const std::string& path, TrainingState& state,
                             const LoadSnapshotOptions& options = {});

}  // namespace lockstep
