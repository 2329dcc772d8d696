#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// Maps names in a file to names of a module, if the two differ:
//
//   .rename = {{"backbone.", ""}, {"head.", "fc."}}
//   .rename = [](const std::string& name) { return "net." + name; }
//
// Only the first prefix in the list with which a name begins is replaced. A
// name that begins with none of them stays as it is.
class Renaming {
 public:
  using Prefixes = std::vector<std::pair<std::string, std::string>>;

  Renaming() = default;
  Renaming(std::initializer_list<Prefixes::value_type> prefixes)
      : Renaming(Prefixes(prefixes)) {}
  Renaming(Prefixes prefixes);

  template <class Function>
    requires(!std::same_as<std::remove_cvref_t<Function>, Renaming> &&
             std::is_invocable_r_v<std::string, Function&, const std::string&>)
  Renaming(Function function) : function_(std::move(function)) {}

  // Returns the tensors under their new names, in the same order. Throws
  // std::invalid_argument if two tensors would get the same name.
  NamedTensors apply(NamedTensors tensors) const;

 private:
  std::function<std::string(const std::string&)> function_;
};

}  // namespace lockstep::internal

namespace lockstep {

// A model's weights in a file of their own, to exchange with Python. (For
// everything that a run needs to continue see training_state.h.)
//
//   lockstep::save_model("model.pt", *model);
//   lockstep::load_model("model.pt", *model);
//   lockstep::load_model("theirs.pt", *model,
//                        {.key = "model", .rename = {{"backbone.", ""}}});
//
// The module is `*model` for a module holder or a std::shared_ptr, and
// `*model.module()` for a DistributedDataParallel, so that names have no
// "module." prefix.
//
// No communication: each process that calls these functions reads or writes.
// One rank should save; each rank that loads does so by itself, and all must be
// given the same file. Both functions block on the disk.

// Writes what Python's torch.save(module.state_dict(), path) does: parameters
// and buffers under Python's names and in its order (module_state.h), for
// module.load_state_dict(torch.load(path, weights_only=True)). The file is
// replaced as a whole and is on the disk when this returns; names, formats and
// errors are those of save_tensors() (snapshot.h).
//
// Throws std::invalid_argument, too, if a parameter is divided over ranks
// (FSDP, tensor parallelism), because this rank has only a part of it: save
// what full_state_dict() (full_state_dict.h) returns, by save_tensors().
void save_model(const std::string& path, const torch::nn::Module& module);

struct LoadModelOptions {
  // ---- Behaviour ----

  // For a file of torch.save({"model": model.state_dict(), "epoch": 3}, path):
  // the name of the entry that holds the weights. Empty means that the file is
  // a state_dict by itself, or a snapshot.
  std::string key{};

  // Maps the file's names to the module's. Afterwards, if all names begin with
  // "module.", that prefix is ignored.
  internal::Renaming rename{};

  // See LoadStateDictOptions.
  bool strict{true};
  bool convert{false};

  // ---- Performance ----

  // Whether the module's tensors become views of the files' memory mapping,
  // instead of being copied into: that takes milliseconds whatever the size,
  // because a page is read when it is used first, and the page cache holds one
  // copy for all processes of the host. Set it for large weights that are only
  // read, or of which a part is used; call it before other things know the
  // tensors' memory (DistributedDataParallel, optimizers). Nothing is verified,
  // and the files must not be changed while the module lives. As in Python's
  // torch.load(mmap=True) with load_state_dict(assign=True). Only for
  // safetensors.
  bool mmap{false};
};

// Does what Python's module.load_state_dict(torch.load(path)) does. If strict,
// the file must have exactly the tensors that `module` has. Shapes must be the
// same, and so must dtypes unless `convert` is set (Python always converts).
//
// `path` may be any file that load_snapshot_file() reads, written by Lockstep
// or by Python: a state_dict, or a snapshot, of which only the model is used.
// It may also be Hugging Face's sharded weights (model.safetensors.index.json,
// or the folder that it is in), or a folder that load_snapshot() reads. Reading
// a file of unknown origin is safe. Values are copied into the tensors that
// `module` has, on their devices: everything that shares their memory sees the
// new values.
//
// A parameter that is divided over ranks takes this rank's part of the file's
// tensor, which must be the whole one.
//
// Returns the names that were left out because `strict` is false.
//
// Throws, before anything is changed: std::system_error if there is no such
// file, SnapshotError if it is damaged or another kind of file,
// std::invalid_argument if it has no such entry or belongs to another model;
// this error names the file and the first few tensors that are missing,
// unexpected, or different.
IncompatibleKeys load_model(const std::string& path, torch::nn::Module& module,
                            const LoadModelOptions& options = {});

}  // namespace lockstep
