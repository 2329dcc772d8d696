#include "lockstep/checkpoint/snapshot.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "lockstep/checkpoint/atomic_file.h"
#include "lockstep/checkpoint/input_file.h"
#include "lockstep/checkpoint/pt/pt_format.h"
#include "lockstep/checkpoint/pt/pt_tree.h"
#include "lockstep/checkpoint/safetensors/safetensors_format.h"

namespace lockstep {
namespace {

// Python reads the names of either format as UTF-8.
void check_text(const std::string& text) {
  try {
    (void)nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw std::invalid_argument(
        "a name or metadata of this snapshot is not UTF-8; rename it");
  }
}

void check_text(const StateTree& tree) {
  if (const auto* text = tree.as<std::string>()) check_text(*text);
  if (const auto* list = tree.as<StateTree::List>()) {
    for (const StateTree& item : *list) check_text(item);
  }
  if (const auto* dict = tree.as<StateTree::Dict>()) {
    for (const auto& [name, item] : dict->items) {
      check_text(name);
      check_text(item);
    }
  }
}

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
  for (const auto& [name, tensor] : snapshot.model_state) check_text(name);
  for (const auto& [name, value] : snapshot.sampler_state) check_text(name);
  if (snapshot.scheduler_state) check_text(*snapshot.scheduler_state);
  for (const auto& [name, value] : snapshot.metadata) {
    check_text(name);
    check_text(value);
  }
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
  for (const auto& [name, tensor] : tensors) check_text(name);
  internal::AtomicFile file(path);
  internal::write_pt(file, internal::tree_of(tensors));
  file.commit();
}

Snapshot load_snapshot_file(const std::string& path) {
  const internal::InputFile file(path);
  return is_pt(file) ? internal::read_pt(file)
                     : internal::read_safetensors(file);
}

NamedTensors load_tensors(const std::string& path, const std::string& key) {
  if (key.empty()) return load_snapshot_file(path).model_state;
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
