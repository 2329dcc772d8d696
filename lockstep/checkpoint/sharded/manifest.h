#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/sharded/save_plan.h"
#include "lockstep/checkpoint/sharded/shard_file.h"
#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// An optimizer's groups, with parameters by name instead of by number: Python's
// get_optimizer_state_dict() has them like this (PyTorch documentation,
// torch.distributed.checkpoint.state_dict).
struct NamedGroup {
  std::map<std::string, StateValue> options{};
  std::vector<std::string> params{};
};

// The file that makes a folder a snapshot: it is written last. It lists the
// files, with checksums of their headers, which have the checksums of the
// tensors; so it stands for every byte of the snapshot.
struct Manifest {
  int64_t world_size = 1;
  // Only epochs_run, step, sampler_state, metadata and scheduler_state.
  Snapshot numbers{};
  // None if no optimizer was saved.
  std::optional<std::vector<NamedGroup>> param_groups{};
  std::optional<int64_t> averager_step{};  // of that optimizer
  // The further names of a parameter that a module has under several (tied
  // weights), with its first, which the optimizer's state has.
  std::map<std::string, std::string> tied{};
  // The items of the training, by name. Their tensors have names that begin
  // with the item's and a dot; if the state is that of each rank, with the
  // item's, a dot, the rank and a dot.
  struct Item {
    bool per_rank = false;
    std::vector<StateTree> values;  // one, or one of each rank
    // The names of an object's tensors in its order, for each of `values`;
    // empty if an older version saved it, or if no order is needed.
    std::vector<std::vector<std::string>> tensors{};
  };
  std::map<std::string, Item> items{};
  std::vector<WrittenFile> files{};
  std::map<std::string, SavePlan::Tensor> tensors{};
  // Which file (its number in `files`) has which box of a tensor, by name; so a
  // rank reads only the headers of the files that have something for it. Empty
  // if the manifest does not say: one of an older version, or of so many parts
  // that listing them would take as long as reading the headers.
  struct Part {
    size_t file = 0;
    Box box;
  };
  std::map<std::string, std::vector<Part>> parts{};
};

// Returns Manifest::parts of a plan whose files are listed by rank; nothing if
// there are too many.
std::map<std::string, std::vector<Manifest::Part>> parts_of(
    const SavePlan& plan);

inline constexpr const char* kManifestName = "manifest.json";

// The version of the folder's format.
inline constexpr int kFolderFormat = 1;

// Returns the text of the file: JSON whose last member is the checksum of all
// text before it.
std::string text_of(const Manifest& manifest);

// Reads such a text. Throws std::runtime_error (or a JSON error) that says what
// is wrong, and std::invalid_argument for a format that this version does not
// know. `checksum`, if not null, is set to that of the text.
Manifest manifest_of(const std::string& text, uint64_t* checksum = nullptr);

// Returns the versions of this library and of LibTorch, for files and manifest.
std::string lockstep_version();
std::string torch_version();

}  // namespace lockstep::internal
