#include "lockstep/checkpoint/snapshot.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "lockstep/checkpoint/atomic_file.h"
#include "lockstep/checkpoint/input_file.h"
#include "lockstep/checkpoint/pt/pt_format.h"
#include "lockstep/checkpoint/pt/pt_tree.h"
#include "lockstep/checkpoint/safetensors/safetensors_format.h"
#include "lockstep/checkpoint/sharded/sharded_load.h"
#include "lockstep/checkpoint/utf8.h"

namespace lockstep {
namespace {

// Returns whether it is a file of torch.save; otherwise it is a safetensors
// file.
bool is_pt(const internal::InputFile& file) {
  // The content decides: a .pt file that was renamed is still one.
  std::array<unsigned char, 9> head{};
  const size_t size = std::min<uint64_t>(head.size(), file.size());
  file.read_at(0, head.data(), size);
  const auto begins = [&](const char* magic, size_t length) {
    return size >= length && std::memcmp(head.data(), magic, length) == 0;
  };
  if (begins("PK\3\4", 4)) return true;
  // A lone pickled long: the magic number of torch.save before 1.6.
  if (begins("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", 8)) {
    throw SnapshotError(file.path(),
                        "was written by torch.save before version 1.6",
                        "load it in Python and save it again");
  }
  if (size == head.size() && head[8] == '{') return false;
  if (size == 0) throw SnapshotError(file.path(), "is empty");
  if (size < head.size()) {
    throw SnapshotError(file.path(),
                        "has " + std::to_string(size) +
                            " bytes, too few for a snapshot: it was cut short");
  }
  throw SnapshotError(file.path(),
                      "is neither a file of torch.save nor a safetensors file",
                      "name the file that holds the snapshot");
}

}  // namespace

void save_snapshot_file(const std::string& path, const Snapshot& snapshot) {
  if (path.ends_with('/')) {
    throw std::invalid_argument(
        "snapshot \"" + path +
        "\" cannot be saved: a folder of snapshots is written by "
        "save_snapshot(), which knows the names of the optimizer's parameters; "
        "name a file");
  }
  for (const auto& [name, tensor] : snapshot.model_state) {
    internal::require_utf8(name);
  }
  internal::require_utf8(snapshot.sampler_state, snapshot.metadata);
  internal::AtomicFile file(path);
  if (std::filesystem::path(path).extension() == ".pt") {
    internal::write_pt(file, internal::tree_of(snapshot));
  } else {
    internal::write_safetensors(file, snapshot);
  }
  file.commit();
}

void save_tensors(const std::string& path, const NamedTensors& tensors) {
  if (std::filesystem::path(path).extension() == ".safetensors") {
    save_snapshot_file(path, {.model_state = tensors});
    return;
  }
  for (const auto& [name, tensor] : tensors) internal::require_utf8(name);
  internal::AtomicFile file(path);
  internal::write_pt(file, internal::tree_of(tensors));
  file.commit();
}

Snapshot load_snapshot_file(const std::string& path) {
  if (const auto files = internal::open_weights(path)) {
    return internal::read_snapshot_folder(*files);
  }
  const internal::InputFile file(path);
  return is_pt(file) ? internal::read_pt(file)
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
  if (key.empty()) {
    if (const auto files = internal::open_weights(path)) {
      return internal::read_weights(*files);
    }
    return load_snapshot_file(path).model_state;
  }
  const internal::InputFile file(path);
  try {
    if (is_pt(file)) return internal::read_pt_entry(file, key);
    throw std::invalid_argument("a safetensors file has no entry \"" + key +
                                "\", only tensors; load it without a key");
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(path + ": " + error.what());
  }
}

}  // namespace lockstep
