#pragma once

#include <torch/nn/module.h>

#include <string>

#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/renaming.h"

// A model's weights in a file of their own, to hand over to Python or to take
// from there. (All that a run needs to go on: training_state.h.)
//
//   lockstep::save_state_dict("model.pt", *model);
//   lockstep::load_state_dict("model.pt", *model);
//   lockstep::load_state_dict("theirs.pt", *model,
//                             {.key = "model", .rename = {{"backbone.", ""}}});
//
// `*model` of a module holder or of a std::shared_ptr; of a
// DistributedDataParallel `*model.module()`, so that names have no "module."
// prefix.
//
// No communication: each process that calls reads or writes. Of several ranks
// one saves; those that load do so each for itself, and must be given the same
// file. Both block on the disk.
namespace lockstep {

// Python's torch.save(module.state_dict(), path): parameters and buffers under
// Python's names and in its order (module_state.h), for
// module.load_state_dict(torch.load(path, weights_only=True)). The file is
// replaced as a whole and on the disk when this returns; names, formats and
// errors are those of write_state_dict() (snapshot.h).
void save_state_dict(const std::string& path, const torch::nn::Module& module);

struct LoadStateDictOptions {
  // For a file of torch.save({"model": model.state_dict(), "epoch": 3}, path):
  // the name of the entry that holds the weights. Empty: the file is a
  // state_dict by itself, or a snapshot.
  std::string key{};
  // From the file's names to the module's. Afterwards, names that all begin
  // with "module." are taken without it.
  Renaming rename{};
  // See RestoreModuleOptions.
  bool strict{true};
  bool convert{false};
};

// Python's module.load_state_dict(torch.load(path)). If strict, the file must
// have exactly the tensors that `module` has. Shapes must be the same, and so
// must dtypes unless `convert` says otherwise (Python always converts).
//
// `path` is any file of read_snapshot(): a state_dict of ours or of Python, as
// it is safe to read from strangers; of a snapshot the model is taken. Values
// are copied into the tensors that `module` has, wherever those are: whatever
// shares their memory sees them.
//
// Returns what was left out because `strict` is false.
//
// Throws, before anything is changed: std::system_error if there is no such
// file, SnapshotError if it is damaged or another kind of file,
// std::invalid_argument if it has no such entry or belongs to another model; it
// names the file and the first few tensors that are missing, too many, or
// differ.
IncompatibleKeys load_state_dict(const std::string& path,
                                 torch::nn::Module& module,
                                 const LoadStateDictOptions& options = {});

}  // namespace lockstep
