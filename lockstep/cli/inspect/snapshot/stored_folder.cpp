// Folders: of Lockstep and of PyTorch's distributed checkpoint, and Hugging
// Face's sharded weights.

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <set>
#include <unordered_map>

#include "lockstep/checkpoint/sharded/sharded_load.h"
#include "lockstep/checkpoint/sharded/tensor_reader.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/cli/inspect/snapshot/stored_snapshot.h"

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

}  // namespace

std::unique_ptr<StoredSnapshot> open_stored_folder(const std::string& path) {
  auto files = open_weights(path);
  if (!files) return nullptr;
  return std::make_unique<StoredFolder>(std::move(*files));
}

}  // namespace lockstep::internal
