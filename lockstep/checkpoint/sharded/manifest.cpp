#include "lockstep/checkpoint/sharded/manifest.h"

#include <torch/version.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "lockstep/checkpoint/safetensors/snapshot_json.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/state/strict_json.h"

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

// The text after the one that has the checksum.
std::string manifest_tail(uint64_t checksum) {
  return ",\n \"xxh3\": \"" + hex_of(checksum) + "\"\n}\n";
}

uint64_t number_from_hex(const Json& json) {
  const auto value = checksum_of(json.get<std::string>());
  if (!value) throw std::runtime_error("a checksum is not a number");
  return *value;
}

Json json_of_groups(const std::vector<NamedGroup>& groups) {
  Json json = Json::array();
  for (const NamedGroup& group : groups) {
    NamedTensors tensors;
    Json options = split_tensors(group.options, "", tensors);
    // No optimizer of LibTorch has such an option.
    if (!tensors.empty()) {
      throw std::invalid_argument(
          "the optimizer's option " + tensors.front().first +
          " is a tensor, which a folder of snapshots cannot hold; make it a "
          "number");
    }
    options["params"] = group.params;
    json.push_back(std::move(options));
  }
  return json;
}

// Beside these, the headers hold little more.
constexpr size_t kMostParts = 1'000'000;

// [file] for a part that is the whole tensor, otherwise
// [file, offsets, sizes]. In one line, since there may be many.
std::string text_of_parts(const Manifest& manifest) {
  Json json = Json::object();
  for (const auto& [name, parts] : manifest.parts) {
    const Box whole = whole_box(manifest.tensors.at(name).shape);
    Json& list = json[name] = Json::array();
    for (const Manifest::Part& part : parts) {
      Json numbers = Json::array({part.file});
      if (part.box != whole) {
        numbers.push_back(part.box.offsets);
        numbers.push_back(part.box.sizes);
      }
      list.push_back(std::move(numbers));
    }
  }
  return json.dump();
}

// Throws if a part cannot lie in a tensor; nothing overflows then.
Manifest::Part part_of_json(const Json& json, const Manifest& manifest,
                            const Sizes& shape) {
  Manifest::Part part{json.at(0).get<size_t>(), whole_box(shape)};
  if (json.size() > 1) {
    part.box = {json.at(1).get<Sizes>(), json.at(2).get<Sizes>()};
  }
  if (part.file >= manifest.files.size() ||
      part.box.sizes.size() != shape.size() ||
      !offsets_fit(part.box.offsets, part.box.sizes)) {
    throw std::runtime_error("it has a part that lies in no file or tensor");
  }
  return part;
}

}  // namespace

std::map<std::string, std::vector<Manifest::Part>> parts_of(
    const SavePlan& plan) {
  std::map<std::string, std::vector<Manifest::Part>> parts;
  if (plan.parts.size() > kMostParts) return parts;
  std::vector<size_t> first(plan.files.size() + 1, 0);  // file of each rank
  for (size_t rank = 0; rank < plan.files.size(); ++rank) {
    first[rank + 1] = first[rank] + plan.files[rank];
  }
  for (const SavePlan::Part& part : plan.parts) {
    parts[part.name].push_back({first.at(part.rank) + part.file, part.box});
  }
  return parts;
}

std::string lockstep_version() { return LOCKSTEP_VERSION; }
std::string torch_version() { return TORCH_VERSION; }

std::string text_of(const Manifest& manifest) {
  Json json = numbers_of(manifest.numbers);
  json["format"] = kFolderFormat;
  json["lockstep_version"] = lockstep_version();
  json["torch_version"] = torch_version();
  json["world_size"] = manifest.world_size;
  if (manifest.param_groups) {
    json["optimizer"] = {
        {"param_groups", json_of_groups(*manifest.param_groups)}};
    if (manifest.averager_step) {
      json["optimizer"]["step"] = *manifest.averager_step;
    }
  }
  if (!manifest.tied.empty()) json["tied"] = manifest.tied;
  for (const auto& [name, item] : manifest.items) {
    Json values = Json::array();
    for (const StateTree& one : item.values) {
      values.push_back(item_json(name, one));
    }
    json["items"][name] = {{"per_rank", item.per_rank},
                           {"values", std::move(values)}};
    if (std::ranges::any_of(
            item.tensors, [](const auto& names) { return names.size() > 1; })) {
      json["items"][name]["tensors"] = item.tensors;
    }
  }
  json["files"] = Json::array();
  for (const WrittenFile& file : manifest.files) {
    json["files"].push_back({{"name", file.name},
                             {"bytes", file.bytes},
                             {"header_xxh3", hex_of(file.header_checksum)}});
  }
  json["tensors"] = Json::object();
  for (const auto& [name, tensor] : manifest.tensors) {
    json["tensors"][name] = {{"dtype", safetensors_dtype(tensor.dtype)},
                             {"shape", tensor.shape},
                             {"placement", tensor.placement}};
  }
  std::string text = json.dump(1);
  text.resize(text.size() - 2);  // without "\n}"
  if (!manifest.parts.empty()) {
    text += ",\n \"parts\": " + text_of_parts(manifest);
  }
  return text + manifest_tail(xxh3(text));
}

Manifest manifest_of(const std::string& text, uint64_t* checksum) {
  const size_t tail = manifest_tail(0).size();
  if (text.size() < tail) throw std::runtime_error("it was cut short");
  const std::string_view body(text.data(), text.size() - tail);
  const uint64_t sum = xxh3(body);
  if (std::string_view(text).substr(body.size()) != manifest_tail(sum)) {
    throw std::runtime_error("it does not match its checksum");
  }
  if (checksum) *checksum = sum;
  const Json json = parse_strict_json(text, kSnapshotJsonDepth);
  if (json.at("format").get<int>() != kFolderFormat) {
    throw std::invalid_argument("its format is " + json.at("format").dump() +
                                ", but this version of Lockstep reads only 1; "
                                "load it with the version that saved it");
  }
  Manifest manifest;
  take_numbers(json, manifest.numbers);
  manifest.world_size = json.at("world_size").get<int64_t>();
  if (json.contains("optimizer")) {
    auto& groups = manifest.param_groups.emplace();
    for (Json options : json.at("optimizer").at("param_groups")) {
      NamedGroup& group = groups.emplace_back();
      group.params = options.at("params").get<std::vector<std::string>>();
      options.erase("params");
      group.options = values_of(options);
    }
    if (json.at("optimizer").contains("step")) {
      manifest.averager_step = json.at("optimizer").at("step").get<int64_t>();
    }
  }
  if (json.contains("tied")) {
    manifest.tied = json.at("tied").get<std::map<std::string, std::string>>();
  }
  if (json.contains("items")) {
    for (const auto& [name, stored] : json.at("items").items()) {
      Manifest::Item& item = manifest.items[name];
      item.per_rank = stored.at("per_rank").get<bool>();
      for (const Json& one : stored.at("values")) {
        item.values.push_back(item_values_of(one));
      }
      if (!item.per_rank && item.values.size() != 1) {
        throw std::runtime_error("the item \"" + name + "\" has no values");
      }
      if (!stored.contains("tensors")) continue;
      item.tensors = stored.at("tensors").get<decltype(item.tensors)>();
      if (item.tensors.size() != item.values.size()) {
        throw std::runtime_error("the item \"" + name +
                                 "\" has not as many lists of tensors as "
                                 "values");
      }
    }
  }
  for (const Json& file : json.at("files")) {
    const auto name = file.at("name").get<std::string>();
    // A file of unknown origin must not make us read files elsewhere.
    if (name.empty() || name.front() == '.' ||
        name.find('/') != std::string::npos) {
      throw std::runtime_error("\"" + name +
                               "\" is not the name of a file in "
                               "the same folder");
    }
    manifest.files.push_back({name, file.at("bytes").get<uint64_t>(),
                              number_from_hex(file.at("header_xxh3"))});
  }
  for (const auto& [name, tensor] : json.at("tensors").items()) {
    manifest.tensors[name] = {
        dtype_of_safetensors(tensor.at("dtype").get<std::string>()),
        tensor.at("shape").get<Sizes>(),
        tensor.at("placement").get<std::string>()};
  }
  if (!json.contains("parts")) return manifest;
  for (const auto& [name, parts] : json.at("parts").items()) {
    const auto tensor = manifest.tensors.find(name);
    if (tensor == manifest.tensors.end()) {
      throw std::runtime_error("it has parts of \"" + name +
                               "\", which is not a tensor of it");
    }
    auto& list = manifest.parts[name];
    for (const Json& part : parts) {
      list.push_back(part_of_json(part, manifest, tensor->second.shape));
    }
  }
  return manifest;
}

}  // namespace lockstep::internal
