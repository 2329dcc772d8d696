// Single files: of torch.save, and safetensors. Folders: of Lockstep and of
// PyTorch's distributed checkpoint, and Hugging Face's sharded weights.

#include "lockstep/cli/inspect/snapshot/stored_snapshot.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <set>
#include <unordered_map>

#include "lockstep/checkpoint/disk_file.h"
#include "lockstep/checkpoint/pt/pt_format.h"
#include "lockstep/checkpoint/safetensors/safetensors_format.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/checkpoint/sharded/shard_file.h"
#include "lockstep/checkpoint/sharded/sharded_load.h"
#include "lockstep/checkpoint/sharded/tensor_reader.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/checkpoint/tensor_bytes.h"

namespace lockstep::internal {
namespace {

using Kind = StoredTensor::Kind;

// Returns the rank whose file it is: 0 for "shard-00001-model-...". PyTorch's
// writer names its files like this, too (_gen_file_name in
// torch/distributed/checkpoint/_hf_utils.py).
std::optional<size_t> rank_of_file(const std::string& name) {
  constexpr std::string_view kBegin = "shard-";
  if (!name.starts_with(kBegin)) return std::nullopt;
  size_t number = 0;
  const char* const end = name.data() + name.size();
  const auto [rest, error] =
      std::from_chars(name.data() + kBegin.size(), end, number);
  if (error != std::errc() || number == 0 || rest == end || *rest != '-') {
    return std::nullopt;
  }
  return number - 1;
}

class StoredFolder : public StoredSnapshot {
 public:
  explicit StoredFolder(TensorFiles files)
      : StoredSnapshot(files.path()), files_(std::move(files)) {
    names_parameters_ = true;
    if (files_.manifest()) numbers_ = files_.manifest()->numbers;
    number_parameters();
    const std::string model = model_prefix(files_, nullptr);
    for (const auto& [stored, tensor] : files_.tensors()) {
      StoredTensor& one = tensors_.emplace_back();
      one.name = stored;
      one.outline = without_memory(tensor);
      one.place = place_of(stored, tensor);
      one.has_checksum =
          std::all_of(tensor.parts.begin(), tensor.parts.end(),
                      [&](const TensorFiles::Part& part) {
                        return part.bytes == 0 ? files_.manifest().has_value()
                                               : !part.checksums.empty();
                      });
      if (stored.starts_with(kStatePrefix)) {
        one.kind = Kind::kOptimizerState;
        one.numbered_name = numbered(stored);
      } else if (stored.starts_with(kOptimizerPrefix) ||
                 stored.starts_with(kGeneratorPrefix)) {
        one.kind = Kind::kOther;
        if (stored.starts_with(kGeneratorPrefix)) {
          numbers_.generator_states.push_back(one.outline);
        }
      } else if (stored.starts_with(model)) {
        one.name = stored.substr(model.size());
      } else {
        one.kind = Kind::kOther;  // of an item
      }
      stored_names_[one.outline.unsafeGetTensorImpl()] = stored;
    }
    std::stable_sort(tensors_.begin(), tensors_.end(),
                     [](const StoredTensor& a, const StoredTensor& b) {
                       return a.kind < b.kind;
                     });
  }

  at::Tensor read(const StoredTensor& tensor) const override {
    return read_tensor(files_,
                       stored_names_.at(tensor.outline.unsafeGetTensorImpl()));
  }

 private:
  void number_parameters() {
    if (!files_.manifest() || !files_.manifest()->param_groups) return;
    size_t number = 0;
    for (const NamedGroup& group : *files_.manifest()->param_groups) {
      for (const std::string& name : group.params) numbers_of_[name] = number++;
    }
  }

  // Returns "optimizer.state.0.exp_avg" for "optimizer.state.0.weight.exp_avg";
  // empty if the parameter has no number.
  std::string numbered(const std::string& name) const {
    const std::string_view prefix = kStatePrefix;
    const size_t dot = name.rfind('.');
    if (dot < prefix.size()) return "";
    const auto found =
        numbers_of_.find(name.substr(prefix.size(), dot - prefix.size()));
    if (found == numbers_of_.end()) return "";
    return std::string(prefix) + std::to_string(found->second) +
           name.substr(dot);
  }

  StoredTensor::Place place_of(const std::string& name,
                               const TensorFiles::Tensor& tensor) const {
    StoredTensor::Place place;
    if (files_.manifest()) {
      place.placement = files_.manifest()->tensors.at(name).placement;
    }
    std::set<std::string> files;
    std::set<size_t> ranks;
    for (const TensorFiles::Part& part : tensor.parts) {
      files.insert(std::filesystem::path(files_.file(part.file).path())
                       .filename()
                       .string());
    }
    for (const std::string& file : files) {
      if (const auto rank = rank_of_file(file)) ranks.insert(*rank);
    }
    place.files.assign(files.begin(), files.end());
    place.ranks.assign(ranks.begin(), ranks.end());
    return place;
  }

  TensorFiles files_;
  std::map<std::string, size_t> numbers_of_;  // by parameter
  // The keys are outlines, because two tensors may be listed under one name
  // (the optimizer's, and that of a module which is named "optimizer").
  std::unordered_map<const c10::TensorImpl*, std::string> stored_names_;
};

// Returns the names of the optimizer's parameters that have one.
std::map<int64_t, std::string> names_by_number(const OptimizerState& state) {
  std::map<int64_t, std::string> names;
  for (const auto& group : state.param_groups) {
    for (size_t i = 0; i < group.param_names.size(); ++i) {
      if (group.param_names[i].empty() || i >= group.params.size()) continue;
      names[group.params[i]] = group.param_names[i];
    }
  }
  return names;
}

// Whether all parameters with state have names.
bool names_all(const Snapshot& snapshot) {
  if (!snapshot.optimizer_state) return false;
  const auto names = names_by_number(*snapshot.optimizer_state);
  return std::ranges::all_of(
      snapshot.optimizer_state->state,
      [&](const auto& one) { return names.contains(one.first); });
}

// Returns all tensors of a snapshot.
std::vector<StoredTensor> tensors_in(const Snapshot& snapshot,
                                     bool has_checksums) {
  std::vector<StoredTensor> all;
  const auto add = [&](Kind kind, std::string name, const at::Tensor& tensor) {
    all.push_back({.kind = kind,
                   .name = std::move(name),
                   .outline = tensor,
                   .has_checksum = has_checksums});
  };
  const auto add_values = [&](Kind kind, const std::string& prefix,
                              const std::map<std::string, StateValue>& values) {
    for (const auto& [key, value] : values) {
      const auto* tensor = std::get_if<at::Tensor>(&value);
      if (tensor && tensor->defined()) add(kind, prefix + "." + key, *tensor);
    }
  };
  for (const auto& [name, tensor] : snapshot.model_state) {
    add(Kind::kModel, name, tensor);
  }
  if (snapshot.optimizer_state) {
    const auto names = names_by_number(*snapshot.optimizer_state);
    for (const auto& [number, values] : snapshot.optimizer_state->state) {
      const auto numbered = kStatePrefix + std::to_string(number);
      const auto name = names.find(number);
      const size_t before = all.size();
      add_values(Kind::kOptimizerState,
                 name == names.end() ? numbered : kStatePrefix + name->second,
                 values);
      for (size_t i = before; i < all.size(); ++i) {
        all[i].numbered_name =
            numbered + all[i].name.substr(all[i].name.rfind('.'));
      }
    }
    size_t group = 0;
    for (const auto& options : snapshot.optimizer_state->param_groups) {
      add_values(Kind::kOther, kOptionPrefix + std::to_string(group++),
                 options.options);
    }
  }
  for (size_t rank = 0; rank < snapshot.generator_states.size(); ++rank) {
    add(Kind::kOther, kGeneratorPrefix + std::to_string(rank),
        snapshot.generator_states[rank]);
  }
  return all;
}

class StoredPt : public StoredSnapshot {
 public:
  explicit StoredPt(InputFile file)
      : StoredSnapshot(file.path()), file_(std::move(file)), zip_(file_) {
    numbers_ = read_pt_outline(
        file_, [&](const c10::Storage& storage, const ZipReader::Entry& entry,
                   c10::ScalarType dtype) {
          storages_[storage.unsafeGetStorageImpl()] = {storage, entry, dtype};
        });
    tensors_ = tensors_in(numbers_, true);
    names_parameters_ = names_all(numbers_);
  }

  at::Tensor read(const StoredTensor& tensor) const override {
    const at::Tensor& outline = tensor.outline;
    const auto* key = outline.storage().unsafeGetStorageImpl();
    if (key != read_key_) {
      read_key_ = nullptr;
      read_bytes_ = at::Tensor();  // before memory for the next is taken
      read_bytes_ = read_storage(tensor.name, storages_.at(key));
      read_key_ = key;
    }
    at::Tensor result =
        at::empty({0}, at::TensorOptions().dtype(outline.scalar_type()));
    result.set_(read_bytes_.storage(), outline.storage_offset(),
                outline.sizes(), outline.strides());
    result._set_conj(outline.is_conj());
    result._set_neg(outline.is_neg());
    return result;
  }

  std::vector<std::string> damage_elsewhere() const override {
    std::set<std::string> of_tensors;
    for (const StoredTensor& tensor : tensors_) {
      const auto* key = tensor.outline.storage().unsafeGetStorageImpl();
      of_tensors.insert(storages_.at(key).entry.name);
    }
    std::vector<std::string> damage;
    for (const ZipReader::Entry& entry : zip_.entries()) {
      if (of_tensors.contains(entry.name)) continue;
      try {
        (void)zip_.read_text(entry);
      } catch (const SnapshotError& error) {
        damage.emplace_back(error.what());
      }
    }
    return damage;
  }

 private:
  struct Stored {
    c10::Storage storage;  // keeps the key of the map
    ZipReader::Entry entry;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
  };

  at::Tensor read_storage(const std::string& name, const Stored& stored) const {
    const at::Tensor bytes =
        at::empty({static_cast<int64_t>(stored.entry.size)}, at::kByte);
    const std::string quoted = "is damaged: tensor \"" + name + "\" (entry \"" +
                               stored.entry.name + "\") ";
    try {
      zip_.read(stored.entry, bytes.data_ptr());
    } catch (const SnapshotError&) {
      throw SnapshotError(path_, quoted + "does not match its checksum");
    }
    if (!valid_values(bytes.data_ptr(), bytes.nbytes(), stored.dtype)) {
      throw SnapshotError(path_,
                          quoted + "holds a bool that is neither 0 nor 1");
    }
    return bytes;
  }

  InputFile file_;
  ZipReader zip_;
  std::unordered_map<const c10::StorageImpl*, Stored> storages_;
  // The storage that was read last: tensors that share one (tied weights, views
  // of one flat tensor) often follow each other.
  mutable const c10::StorageImpl* read_key_ = nullptr;
  mutable at::Tensor read_bytes_;
};

// Also one file of a folder, which has other checksums.
class StoredSafetensors : public StoredSnapshot {
 public:
  explicit StoredSafetensors(InputFile file)
      : StoredSnapshot(file.path()),
        file_(std::move(file)),
        reader_(file_),
        details_(details_of(reader_.header())) {
    std::vector<at::Tensor> outlines;
    for (const SafetensorsEntry& entry : reader_.entries()) {
      outlines.push_back(
          at::empty(entry.shape,
                    at::TensorOptions().dtype(entry.dtype).device(at::kMeta)));
      numbers_of_.emplace(outlines.back().unsafeGetTensorImpl(),
                          outlines.size() - 1);
    }
    numbers_ = reader_.snapshot_with(std::move(outlines));
    const auto& metadata = reader_.header().metadata;
    tensors_ = tensors_in(numbers_, reader_.has_checksums() ||
                                        metadata.contains(kShardChecksums));
    names_parameters_ = names_all(numbers_);
  }

  at::Tensor read(const StoredTensor& tensor) const override {
    const size_t number = numbers_of_.at(tensor.outline.unsafeGetTensorImpl());
    at::Tensor result = reader_.read(reader_.entries()[number]);
    const auto* bytes = static_cast<const char*>(result.const_data_ptr());
    uint64_t begin = 0;
    for (const uint64_t sum : details_[number].checksums) {
      const auto size =
          std::min<uint64_t>(kChecksumBlock, result.nbytes() - begin);
      if (xxh3(bytes + begin, size) != sum) {
        throw SnapshotError(path_, "is damaged: tensor \"" + tensor.name +
                                       "\" does not match its checksum");
      }
      begin += size;
    }
    return result;
  }

 private:
  std::vector<ShardDetails> details_of(const SafetensorsHeader& header) const {
    try {
      return shard_details(header);
    } catch (const std::exception& error) {
      throw SnapshotError(
          path_,
          std::string("is damaged: its header is invalid: ") + error.what());
    }
  }

  InputFile file_;
  SafetensorsReader reader_;
  std::vector<ShardDetails> details_;  // of reader_.entries()
  std::unordered_map<const c10::TensorImpl*, size_t> numbers_of_;
};

// Returns null if `path` is a single file, or if nothing exists under it.
std::unique_ptr<StoredSnapshot> open_stored_folder(const std::string& path) {
  auto files = open_weights(path);
  if (!files) return nullptr;
  return std::make_unique<StoredFolder>(std::move(*files));
}

std::unique_ptr<StoredSnapshot> open_stored_file(const std::string& path) {
  InputFile file(path);
  if (is_pt(file)) return std::make_unique<StoredPt>(std::move(file));
  return std::make_unique<StoredSafetensors>(std::move(file));
}

}  // namespace

std::unique_ptr<StoredSnapshot> StoredSnapshot::open(const std::string& path) {
  if (auto folder = open_stored_folder(path)) return folder;
  return open_stored_file(path);
}

}  // namespace lockstep::internal
