#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/snapshot_error.h"

// What a snapshot is, and its two file formats. One process, no
// communication; lockstep/checkpoint/training_state.h is the same for all
// ranks of a job. The formats byte by byte: docs/snapshots.md.
namespace lockstep {

// What state_dict() of a module is in Python: "0.weight" and its tensor, in
// the order of registration.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// A value in an optimizer's state or hyperparameters: None, bool, int, float,
// a tuple of floats (`betas`), a tensor.
using StateValue = std::variant<std::monostate, bool, int64_t, double,
                                std::vector<double>, at::Tensor>;

// What state_dict() of an optimizer is in Python (PyTorch documentation,
// torch.optim.Optimizer.state_dict): parameters are counted through all
// groups, from 0.
struct OptimizerState {
  struct Group {
    std::map<std::string, StateValue> options{};
    std::vector<int64_t> params{};
  };
  std::map<int64_t, std::map<std::string, StateValue>> state{};
  std::vector<Group> param_groups{};
};

// A sampler's position, as its state_dict() gives it: "epoch", "seed", the
// samples consumed so far. What the names mean is the sampler's affair.
using SamplerState = std::map<std::string, int64_t>;

// Everything that a training run needs to go on. Tensors are on the CPU once
// read; those to be written may be anywhere.
struct Snapshot {
  NamedTensors model_state{};
  // None: the file holds a model only, as the Python tutorial's.
  std::optional<OptimizerState> optimizer_state{};
  // The last epoch that has ended, counted from 0, as the Python tutorial
  // stores it; -1 before the first has.
  int64_t epochs_run{-1};
  // Optimizer steps since the beginning of training.
  int64_t step{0};
  // Empty: the run stood between two epochs or has no sampler.
  SamplerState sampler_state{};
  // Of each rank, its CPU generator's get_state() (uint8, one dimension).
  std::vector<at::Tensor> generator_states{};
  // Free for the caller; UTF-8.
  std::map<std::string, std::string> metadata{};
  // Of the file's content, set by read_snapshot(): two files of the same
  // digest hold the same. Not a defence against forgery.
  uint64_t digest{0};
};

// Replaces the file at `path` as a whole (lockstep/checkpoint/atomic_file.h):
// "*.pt" becomes a file of torch.save, any other name one of safetensors.
// Blocks until it is on the disk.
//
// Throws std::system_error if that fails (the file that was there is kept) and
// std::invalid_argument for what the format cannot hold: equal names, a dtype
// it lacks, a name under "lockstep." in safetensors.
void write_snapshot(const std::string& path, const Snapshot& snapshot);

// The same of tensors by their names and nothing else, what Python's
// torch.save(model.state_dict(), path) writes; a file of torch.save whatever
// its name ("*.pth", "*.bin"), except that "*.safetensors" becomes one of
// safetensors.
void write_state_dict(const std::string& path, const NamedTensors& tensors);

// Reads either format, whichever the content is. From the same source:
//   .pt          a dict with MODEL_STATE, of ours or of the Python tutorial;
//                or a bare state_dict
//   safetensors  with or without Lockstep's entries
// Safe on files of unknown origin: no code is run, memory is bounded by the
// size of the file, every checksum there is is compared.
//
// Throws SnapshotError, and std::system_error if the file cannot be opened or
// read (ENOENT where there is none).
Snapshot read_snapshot(const std::string& path);

// The tensors alone: those under `key` in the dict that torch.save wrote, such
// as "model" of {"model": ..., "epoch": 3}; without a key read_snapshot()'s
// model. The same errors, and std::invalid_argument if the file has no such
// entry or if the entry is not a state_dict.
NamedTensors read_state_dict(const std::string& path,
                             const std::string& key = {});

}  // namespace lockstep
