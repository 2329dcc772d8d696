#include "lockstep/checkpoint/snapshot.h"

#include <ATen/Functions.h>

#include <stdexcept>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/disk_file.h"
#include "lockstep/checkpoint/file_save.h"
#include "lockstep/checkpoint/pt/pickle.h"
#include "lockstep/checkpoint/pt/pt_format.h"
#include "lockstep/checkpoint/safetensors/safetensors_format.h"
#include "lockstep/checkpoint/safetensors/snapshot_json.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/checkpoint/sharded/sharded_load.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/checkpoint/utf8.h"

namespace lockstep {
namespace {

internal::SnapshotForm form_of_file(const std::string& path) {
  const internal::SnapshotForm form = internal::form_of(path);
  if (form != internal::SnapshotForm::kFolder) return form;
  throw std::invalid_argument(
      "\"" + path +
      "\" is the name of a folder, which only save_snapshot() and "
      "SnapshotSaver write; name a file: .pt, .pth or .safetensors");
}

// Throws if something of the snapshot's file would be lost.
void require_whole(const Snapshot& snapshot) {
  const auto refuse = [](const std::string& part, const std::string& why) {
    if (why.empty()) return;
    throw std::invalid_argument("the " + part + " was not read whole: " + why);
  };
  if (!snapshot.not_tensors.empty()) {
    refuse("model's state", snapshot.not_tensors.front() +
                                " is not a tensor; clear "
                                "Snapshot::not_tensors to leave it "
                                "out");
  }
  refuse("scheduler's state", snapshot.scheduler_unreadable);
  if (!snapshot.optimizer_state) return;
  refuse("optimizer's state", snapshot.optimizer_state->unreadable);
  for (const auto& group : snapshot.optimizer_state->param_groups) {
    refuse("optimizer's state", group.unreadable);
  }
}

// Calls `visit(name, tensor)` for each tensor of a model, an optimizer or an
// item.
template <class AnySnapshot, class Visit>
void for_each_tensor(AnySnapshot& snapshot, const Visit& visit) {
  for (auto& [name, tensor] : snapshot.model_state) visit(name, tensor);
  for (auto& [item, state] : snapshot.items) {
    for (auto& [name, tensor] : state.tensors) visit(name, tensor);
  }
  if (!snapshot.optimizer_state) return;
  for (auto& [number, values] : snapshot.optimizer_state->state) {
    for (auto& [name, value] : values) {
      if (auto* tensor = std::get_if<at::Tensor>(&value)) visit(name, *tensor);
    }
  }
}

void require_utf8_names(const Snapshot& snapshot) {
  const auto require = [](const NamedTensors& tensors) {
    for (const auto& [name, tensor] : tensors) internal::require_utf8(name);
  };
  require(snapshot.model_state);
  internal::require_utf8(snapshot.sampler_state, snapshot.metadata);
  if (snapshot.scheduler_state) {
    internal::require_utf8(*snapshot.scheduler_state);
  }
  for (const auto& [name, item] : snapshot.items) {
    internal::require_utf8(name);
    internal::require_utf8(item.values);
    require(item.tensors);
  }
}

}  // namespace

void save_snapshot_file(const std::string& path, const Snapshot& snapshot) {
  internal::write_snapshot_file(path, snapshot)->commit();
}

std::unique_ptr<internal::AtomicFile> internal::write_snapshot_file(
    const std::string& path, const Snapshot& snapshot) {
  const SnapshotForm form = form_of_file(path);
  require_whole(snapshot);
  require_utf8_names(snapshot);
  for_each_tensor(snapshot, require_values);
  auto file = std::make_unique<AtomicFile>(path);
  if (form == SnapshotForm::kPt) {
    write_pt(*file, tree_of(snapshot));
  } else {
    write_safetensors(*file, snapshot);
  }
  return file;
}

void internal::check_snapshot_file(const std::string& path,
                                   const Snapshot& snapshot) {
  require_utf8_names(snapshot);
  Snapshot outline = snapshot;
  const auto empty = [](const std::string& name, at::Tensor& tensor) {
    require_dense(name, tensor);
    tensor = at::empty({0}, at::TensorOptions().dtype(tensor.dtype()));
  };
  for_each_tensor(outline, empty);
  if (form_of_file(path) == SnapshotForm::kPt) {
    (void)write_pickle(tree_of(outline), [](const at::Tensor&) { return "0"; });
    return;
  }
  for (const auto& [name, tensor] : safetensors_tree_of(outline).tensors) {
    (void)safetensors_dtype(tensor.scalar_type());
  }
}

void save_tensors(const std::string& path, const NamedTensors& tensors) {
  if (form_of_file(path) == internal::SnapshotForm::kSafetensors) {
    Snapshot snapshot = internal::without_numbers();
    snapshot.model_state = tensors;
    save_snapshot_file(path, snapshot);
    return;
  }
  for (const auto& [name, tensor] : tensors) {
    internal::require_utf8(name);
    internal::require_values(name, tensor);
  }
  internal::AtomicFile file(path);
  internal::write_pt(file, internal::tree_of(tensors));
  file.commit();
}

Snapshot load_snapshot_file(const std::string& path) {
  if (const auto files = internal::open_weights(path)) {
    return internal::read_snapshot_folder(*files);
  }
  const internal::InputFile file(path);
  return internal::is_pt(file) ? internal::read_pt(file)
                               : internal::read_safetensors(file);
}

void verify_snapshot(const std::string& path) {
  if (const auto files = internal::open_weights(path)) {
    internal::verify_tensor_files(*files);
  } else {
    (void)load_snapshot_file(path);
  }
}

NamedTensors load_tensors(const std::string& path, const std::string& key) {
  NamedTensors tensors = internal::load_state_dict_file(path, key);
  std::erase_if(tensors,
                [](const auto& item) { return !item.second.defined(); });
  return tensors;
}

NamedTensors internal::load_state_dict_file(const std::string& path,
                                            const std::string& key) {
  if (key.empty()) {
    if (const auto files = internal::open_weights(path)) {
      return internal::read_weights(*files);
    }
  }
  const internal::InputFile file(path);
  try {
    if (internal::is_pt(file)) return internal::read_pt_entry(file, key);
    if (key.empty()) return internal::read_safetensors(file).model_state;
    throw std::invalid_argument("a safetensors file has no entry \"" + key +
                                "\", only tensors; load it without a key");
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(path + ": " + error.what());
  }
}

}  // namespace lockstep
