#include "lockstep/checkpoint/safetensors/safetensors_format.h"

#include <ATen/Functions.h>
#include <zlib.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "lockstep/checkpoint/safetensors/snapshot_json.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/state/digest.h"
#include "lockstep/state/strict_json.h"

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

constexpr int kFormat = 1;
constexpr const char* kState = "lockstep.state.";  // + index + "." + name
constexpr const char* kGroup = "lockstep.param_groups.";   // likewise
constexpr const char* kGenerator = "lockstep.generator.";  // + rank
constexpr const char* kItem = "lockstep.items.";           // + name + "." + key

// Splits "12.exp_avg" into parameter 12 and its "exp_avg".
std::pair<int64_t, std::string> split_index(const std::string& text) {
  int64_t index = -1;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, index);
  if (error != std::errc() || index < 0 || (rest != end && *rest != '.')) {
    throw std::runtime_error("a tensor under \"lockstep.\" has no index");
  }
  return {index, rest == end ? "" : std::string(rest + 1, end)};
}

// The same for what follows `prefix` in `name`; nothing if that begins
// otherwise.
std::optional<std::pair<int64_t, std::string>> index_after(
    std::string_view prefix, const std::string& name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  return split_index(name.substr(prefix.size()));
}

// Returns where the optimizer's value with this name belongs, or nullptr if the
// snapshot has no such parameter or group.
StateValue* optimizer_value(Snapshot& snapshot, const std::string& name) {
  if (!snapshot.optimizer_state) return nullptr;
  auto& state = snapshot.optimizer_state->state;
  auto& groups = snapshot.optimizer_state->param_groups;
  if (const auto place = index_after(kState, name)) {
    const auto found = state.find(place->first);
    return found == state.end() ? nullptr : &found->second[place->second];
  }
  if (const auto place = index_after(kGroup, name)) {
    const auto at = static_cast<size_t>(place->first);
    return at < groups.size() ? &groups[at].options[place->second] : nullptr;
  }
  return nullptr;
}

// Returns where the tensor of an item with this name belongs, or nullptr if it
// is none, or if the snapshot has no such item.
NamedTensors* item_tensors(Snapshot& snapshot, const std::string& name) {
  if (!name.starts_with(kItem)) return nullptr;
  const size_t begin = std::strlen(kItem);
  const size_t dot = name.find('.', begin);
  if (dot == std::string::npos) return nullptr;
  const auto found = snapshot.items.find(name.substr(begin, dot - begin));
  return found == snapshot.items.end() ? nullptr : &found->second.tensors;
}

}  // namespace

SafetensorsTree safetensors_tree_of(const Snapshot& snapshot) {
  SafetensorsTree tree;
  std::map<std::string, at::Tensor> by_name;
  for (const auto& [name, tensor] : snapshot.model_state) {
    if (name.starts_with(kReserved) || name == "__metadata__") {
      throw std::invalid_argument("the model has a tensor named \"" + name +
                                  "\", which is reserved in safetensors; "
                                  "rename it, or name the snapshot .pt");
    }
    if (!by_name.emplace(name, tensor).second) {
      throw std::invalid_argument("the model has two tensors named \"" + name +
                                  "\"; a snapshot needs one name for each");
    }
  }
  // The first by name of tensors that are one is kept, as in Python.
  std::map<TensorMemory, std::string> kept;
  for (const auto& [name, tensor] : by_name) {
    if (!may_be_tied(tensor)) continue;
    const auto [first, is_first] = kept.emplace(memory_of(tensor), name);
    if (!is_first) tree.aliases.emplace(name, first->second);
  }
  for (const auto& [name, tensor] : snapshot.model_state) {
    if (tree.aliases.contains(name)) continue;
    tree.tensors.emplace_back(name, file_form(tensor));
  }
  Json json = numbers_of(snapshot);
  json["format"] = kFormat;
  const auto absent = still_absent(snapshot);
  if (!absent.empty()) json["absent"] = absent;
  json["generator_states"] = snapshot.generator_states.size();
  if (snapshot.optimizer_state) {
    Json state = Json::object();
    for (const auto& [index, values] : snapshot.optimizer_state->state) {
      const std::string key = std::to_string(index);
      state[key] = split_tensors(values, kState + key + ".", tree.tensors);
    }
    Json groups = Json::array();
    for (const auto& group : snapshot.optimizer_state->param_groups) {
      const std::string key = std::to_string(groups.size());
      Json options =
          split_tensors(group.options, kGroup + key + ".", tree.tensors);
      groups.push_back({{"options", options}, {"params", group.params}});
      if (!group.param_names.empty()) {
        groups.back()["param_names"] = group.param_names;
      }
    }
    json["optimizer_state"] = {{"state", state}, {"param_groups", groups}};
    if (const auto step = snapshot.optimizer_state->averager_step) {
      json["optimizer_state"]["step"] = *step;
    }
  }
  for (size_t rank = 0; rank < snapshot.generator_states.size(); ++rank) {
    tree.tensors.emplace_back(kGenerator + std::to_string(rank),
                              file_form(snapshot.generator_states[rank]));
  }
  for (const auto& [name, item] : snapshot.items) {
    if (name.find('.') != name.npos) {
      throw std::invalid_argument("the item \"" + name +
                                  "\" has a dot in its name, which a snapshot "
                                  "in safetensors cannot have");
    }
    json["items"][name] = item_json(name, item.values);
    // Keeps their order: the file sorts tensors by the size of their elements.
    if (item.tensors.size() > 1) json["item_tensors"][name] = Json::array();
    for (const auto& [key, tensor] : item.tensors) {
      if (item.tensors.size() > 1) json["item_tensors"][name].push_back(key);
      tree.tensors.emplace_back(kItem + name + "." + key, file_form(tensor));
    }
  }
  tree.description = json.dump();
  std::set<std::string> names;
  for (const auto& [name, tensor] : tree.tensors) {
    if (names.insert(name).second) continue;
    throw std::invalid_argument("two tensors of the snapshot are named \"" +
                                name + "\"; it needs one name for each");
  }
  return tree;
}

Snapshot snapshot_of(const SafetensorsTree& tree) {
  Snapshot snapshot;
  if (tree.description.empty()) {
    snapshot = without_numbers();
    snapshot.model_state = tree.tensors;
    return snapshot;
  }
  const Json json = parse_strict_json(tree.description, kSnapshotJsonDepth);
  if (json.at("format").get<int>() != kFormat) {
    throw std::runtime_error("its format is " + json.at("format").dump() +
                             ", but this version of Lockstep reads only 1");
  }
  take_numbers(json, snapshot);
  snapshot.absent = json.value("absent", std::set<std::string>());
  if (json.contains("optimizer_state")) {
    OptimizerState& optimizer = snapshot.optimizer_state.emplace();
    const Json& stored = json.at("optimizer_state");
    for (const auto& [index, values] : stored.at("state").items()) {
      const auto [parameter, key] = split_index(index);
      if (!key.empty()) {
        throw std::runtime_error("the optimizer's state is of \"" + index +
                                 "\", which is not a parameter's number");
      }
      optimizer.state[parameter] = values_of(values);
    }
    for (const Json& group : stored.at("param_groups")) {
      optimizer.param_groups.push_back(
          {values_of(group.at("options")),
           group.at("params").get<std::vector<int64_t>>(),
           group.value("param_names", std::vector<std::string>())});
    }
    if (stored.contains("step")) {
      optimizer.averager_step = stored.at("step").get<int64_t>();
    }
  }
  if (json.contains("items")) {
    for (const auto& [name, values] : json.at("items").items()) {
      snapshot.items[name].values = item_values_of(values);
    }
  }
  std::map<int64_t, at::Tensor> generators;
  for (const auto& [name, tensor] : tree.tensors) {
    if (!name.starts_with(kReserved)) {
      snapshot.model_state.emplace_back(name, tensor);
    } else if (const auto rank = index_after(kGenerator, name)) {
      generators[rank->first] = tensor;
    } else if (auto* place = optimizer_value(snapshot, name)) {
      *place = tensor;
    } else if (auto* tensors = item_tensors(snapshot, name)) {
      // A name of an item has no dot.
      tensors->emplace_back(name.substr(name.find('.', std::strlen(kItem)) + 1),
                            tensor);
    } else {
      throw std::runtime_error("the description says nothing of the tensor \"" +
                               name + "\"");
    }
  }
  const auto orders = json.value(
      "item_tensors", std::map<std::string, std::vector<std::string>>());
  for (auto& [name, item] : snapshot.items) {
    const auto order = orders.find(name);
    if (order != orders.end()) order_tensors(item.tensors, order->second);
  }
  const std::map<std::string, at::Tensor> known(snapshot.model_state.begin(),
                                                snapshot.model_state.end());
  for (const auto& [name, other] : tree.aliases) {
    const auto found = known.find(other);
    if (found == known.end() || known.contains(name)) {
      throw std::runtime_error("it calls \"" + name + "\" another name of \"" +
                               other + "\", which it cannot be");
    }
    snapshot.model_state.emplace_back(name, found->second);
  }
  if (json.at("generator_states").get<size_t>() != generators.size()) {
    throw std::runtime_error("a generator's state is missing");
  }
  for (auto& [rank, tensor] : generators) {
    snapshot.generator_states.push_back(tensor);
  }
  return snapshot;
}

namespace {

constexpr const char* kChecksums = "lockstep.crc32";

uint32_t checksum(const at::Tensor& tensor) {
  return static_cast<uint32_t>(::crc32_z(
      0, static_cast<const Bytef*>(tensor.data_ptr()), tensor.nbytes()));
}

// Returns the checksum of every tensor, or nothing if the file has none. Throws
// std::runtime_error or a JSON error if they are not what Lockstep writes.
std::map<std::string, uint32_t> stored_checksums(
    const SafetensorsHeader& header) {
  const auto own = header.metadata.find(kHeaderChecksum);
  const auto each = header.metadata.find(kChecksums);
  const auto rest = header.metadata.find(kSnapshotKey);
  const size_t there = (own != header.metadata.end() ? 1u : 0u) +
                       (each != header.metadata.end() ? 1u : 0u) +
                       (rest != header.metadata.end() ? 1u : 0u);
  if (there == 0) return {};  // not written by Lockstep
  if (there != 3 || own->second != std::to_string(header.crc32)) {
    throw std::runtime_error("it does not match its checksum");
  }
  auto sums =
      parse_strict_json(each->second, 2).get<std::map<std::string, uint32_t>>();
  for (const SafetensorsEntry& entry : header.entries) {
    if (!sums.contains(entry.name)) {
      throw std::runtime_error("tensor \"" + entry.name + "\" has no checksum");
    }
  }
  return sums;
}

}  // namespace

void write_safetensors(AtomicFile& file, const Snapshot& snapshot) {
  SafetensorsTree tree = safetensors_tree_of(snapshot);
  // Tensors with wide elements come first; so every tensor is aligned, because
  // the header is.
  std::stable_sort(tree.tensors.begin(), tree.tensors.end(),
                   [](const auto& a, const auto& b) {
                     return a.second.element_size() > b.second.element_size();
                   });
  std::vector<SafetensorsEntry> entries;
  nlohmann::json sums = nlohmann::json::object();
  uint64_t offset = 0;
  for (const auto& [name, tensor] : tree.tensors) {
    const uint64_t end = offset + tensor.nbytes();
    entries.push_back(
        {name, tensor.scalar_type(), tensor.sizes().vec(), offset, end});
    sums[name] = checksum(tensor);
    offset = end;
  }
  std::map<std::string, std::string> metadata = std::move(tree.aliases);
  metadata[kSnapshotKey] = tree.description;
  metadata[kChecksums] = sums.dump();
  const std::string header = make_header(entries, metadata);
  const uint64_t length = header.size();
  file.write(&length, sizeof length);
  file.write(header.data(), header.size());
  for (const auto& [name, tensor] : tree.tensors) {
    file.write(tensor.data_ptr(), tensor.nbytes());
  }
}

SafetensorsReader::SafetensorsReader(const InputFile& file)
    : file_(file), header_(read_header(file)) {
  try {
    sums_ = stored_checksums(header_);
  } catch (const std::exception& error) {
    throw SnapshotError(
        file.path(),
        std::string("is damaged: its header is invalid: ") + error.what());
  }
  has_checksums_ = header_.metadata.contains(kHeaderChecksum);
}

at::Tensor SafetensorsReader::read(const SafetensorsEntry& entry,
                                   uint32_t* sum) const {
  at::Tensor tensor =
      at::empty(entry.shape, at::TensorOptions().dtype(entry.dtype));
  file_.read_at(header_.data_offset + entry.begin, tensor.data_ptr(),
                tensor.nbytes());
  const uint32_t computed = checksum(tensor);
  if (sum) *sum = computed;
  if (!sums_.empty() && sums_.at(entry.name) != computed) {
    throw SnapshotError(file_.path(), "is damaged: tensor \"" + entry.name +
                                          "\" does not match its checksum");
  }
  if (!valid_values(tensor.data_ptr(), tensor.nbytes(), entry.dtype)) {
    throw SnapshotError(file_.path(),
                        "is damaged: tensor \"" + entry.name +
                            "\" holds a bool that is neither 0 nor 1");
  }
  return tensor;
}

Snapshot SafetensorsReader::snapshot_with(
    std::vector<at::Tensor> tensors) const {
  SafetensorsTree tree;
  for (size_t i = 0; i < tensors.size(); ++i) {
    tree.tensors.emplace_back(header_.entries.at(i).name,
                              std::move(tensors[i]));
  }
  if (header_.metadata.contains(kSnapshotKey)) {
    tree.description = header_.metadata.at(kSnapshotKey);
    for (const auto& [name, value] : header_.metadata) {
      if (!name.starts_with(kReserved)) tree.aliases.emplace(name, value);
    }
  }
  try {
    return snapshot_of(tree);
  } catch (const std::exception& error) {
    throw SnapshotError(file_.path(),
                        std::string("cannot be used: ") + error.what());
  }
}

Snapshot read_safetensors(const InputFile& file) {
  const SafetensorsReader reader(file);
  Digest digest;
  digest.add(uint64_t{reader.header().crc32});
  std::vector<at::Tensor> tensors;
  for (const SafetensorsEntry& entry : reader.entries()) {
    uint32_t sum = 0;
    tensors.push_back(reader.read(entry, &sum));
    digest.add(uint64_t{sum});
  }
  Snapshot snapshot = reader.snapshot_with(std::move(tensors));
  snapshot.digest = digest.value();
  return snapshot;
}

}  // namespace lockstep::internal
