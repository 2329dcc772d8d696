#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/state/state_tree.h"

// Snapshots and their two file formats, for one process and without
// communication; lockstep/checkpoint/training_state.h does the same for all
// ranks of a job. docs/internals/snapshot-formats.md has the formats.
namespace lockstep {

// The same as Python's state_dict() of a module: "0.weight" and its tensor, in
// the order of registration.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// A value in an optimizer's state or hyperparameters: None, bool, int, float,
// a tuple of floats (`betas`), a tensor.
using StateValue = std::variant<std::monostate, bool, int64_t, double,
                                std::vector<double>, at::Tensor>;

// The same as Python's state_dict() of an optimizer (PyTorch documentation,
// torch.optim.Optimizer.state_dict): parameters are numbered through all
// groups, from 0.
struct OptimizerState {
  struct Group {
    std::map<std::string, StateValue> options{};
    std::vector<int64_t> params{};
    // Their names in the module, in the order of `params`; "" for one that is
    // not the module's. Empty if only numbers are known.
    std::vector<std::string> param_names{};
    // Names, in one line, the first of `options` that StateValue cannot hold (a
    // text, a dict). If it is not empty, loading these options is refused, and
    // so is saving.
    std::string unreadable{};
  };
  std::map<int64_t, std::map<std::string, StateValue>> state{};
  std::vector<Group> param_groups{};
  // A PostLocalSGDOptimizer's averager().step, which Python has under "step".
  std::optional<int64_t> averager_step{};
  // Says, in one line, what of the state was not read: a value that StateValue
  // cannot hold (LBFGS's lists), or all of it, if it is not as above. If it is
  // not empty, load_state_dict() and saving refuse the state.
  std::string unreadable{};
};

// A sampler's position, as its state_dict() returns it: "epoch", "seed", the
// samples consumed so far. Only the sampler interprets the names.
using SamplerState = std::map<std::string, int64_t>;

// The state of an item of TrainingState::items (state_item.h): values (a dict,
// as a rule, or None) and tensors.
struct ItemState {
  StateTree values{};
  NamedTensors tensors{};
};

// Everything that a training run needs to continue. Tensors that were read are
// on the CPU, and views of memory as Python has saved them (of any strides,
// also lazy conjugates and negatives): copy them before you look at their
// memory. Tensors to be written may be on any device.
struct Snapshot {
  NamedTensors model_state{};
  // None if the file holds only a model, as the Python tutorial's does.
  std::optional<OptimizerState> optimizer_state{};
  // The same as Python's state_dict() of a learning-rate scheduler. None if the
  // file holds no scheduler. The numbers that Python's scheduler keeps in the
  // optimizer's groups ("initial_lr") are in optimizer_state.
  std::optional<StateTree> scheduler_state{};
  // The last epoch that has ended, counted from 0, as the Python tutorial
  // stores it; -1 before the first has ended.
  int64_t epochs_run{-1};
  // Optimizer steps since the beginning of training.
  int64_t step{0};
  // Empty if the run was between two epochs or has no sampler.
  SamplerState sampler_state{};
  // Each rank's get_state() of the default CPU generator and, after it, of
  // those of the devices on which the model is (uint8, one dimension).
  std::vector<at::Tensor> generator_states{};
  // For the caller's use; UTF-8.
  std::map<std::string, std::string> metadata{};
  // Those of "epochs_run", "step", "sampler_state" and "metadata" that the file
  // does not have (the Python tutorial's has no `step`), or has in another form
  // (METADATA that is not a dict of texts). Set by load_snapshot_file(). Saving
  // leaves them out, too, unless they have been set.
  std::set<std::string> absent{};
  // The names in MODEL_STATE whose values are not tensors (Python's
  // `_extra_state`), which were not read; and the reason for which
  // `scheduler_state` was not read, if the file has one. Saving refuses a
  // snapshot that has either.
  std::vector<std::string> not_tensors{};
  std::string scheduler_unreadable{};
  // The state of each item of the training, by name. That of an optimizer is as
  // Python's get_optimizer_state_dict() returns it: `param_groups` whose
  // `params` are names, and tensors such as "state.0.weight.exp_avg". If each
  // rank has saved its own state, the values are a list by rank, and the names
  // of tensors begin with the rank and a dot.
  std::map<std::string, ItemState> items{};
  // The digest of the file's content, set by load_snapshot_file(): two files
  // with the same digest hold the same. Not a defence against forgery.
  uint64_t digest{0};
};

// Replaces the file at `path` as a whole (lockstep/checkpoint/disk_file.h):
// "*.pt" and "*.pth" become files of torch.save, "*.safetensors" a safetensors
// file. Blocks until it is on the disk.
//
// Throws std::system_error if writing fails (the old file is kept) and
// std::invalid_argument for another name, and for what the format cannot hold:
// equal names, a dtype that it lacks, a name under "lockstep." in safetensors.
void save_snapshot_file(const std::string& path, const Snapshot& snapshot);

// Does the same for named tensors and nothing else, which is what Python's
// torch.save(model.state_dict(), path) writes, or safetensors.torch.save_model:
// of tensors that are one (tied weights) a safetensors file has the first by
// name, and the others' names in its metadata.
void save_tensors(const std::string& path, const NamedTensors& tensors);

// Reads a file of either format; the content decides which, not the name:
//   .pt          a dict with MODEL_STATE, from Lockstep or the Python tutorial;
//                or a bare state_dict
//   safetensors  with or without Lockstep's entries. Of tied weights, a file
//                of other programs has one name only (load_state_dict() needs
//                no more)
//   a folder     one snapshot that save_snapshot() wrote, or a folder of them,
//                of which the newest is read; weights that PyTorch's
//                distributed checkpoint or Hugging Face wrote as safetensors
// Safe for files of unknown origin: no code is run, memory is bounded by the
// size of the file, and every checksum that the file has is compared.
//
// Throws SnapshotError, and std::system_error if the file cannot be opened or
// read (ENOENT if there is none).
Snapshot load_snapshot_file(const std::string& path);

// Reads all of a snapshot and compares every checksum that it has, in little
// memory if it is a folder. Throws the errors of load_snapshot_file(), which
// name the file and the tensor that are damaged.
void verify_snapshot(const std::string& path);

// Returns only the tensors: those under `key` in the dict that torch.save
// wrote, such as "model" of {"model": ..., "epoch": 3}; without a key the model
// of load_snapshot_file(). A module's `_extra_state`, which need not be a
// tensor, is left out then. Throws the same errors, and std::invalid_argument
// if the file has no such entry or if the entry is not a state_dict.
NamedTensors load_tensors(const std::string& path, const std::string& key = {});

}  // namespace lockstep
