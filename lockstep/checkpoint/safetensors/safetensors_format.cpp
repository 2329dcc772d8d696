#include "lockstep/checkpoint/safetensors/safetensors_format.h"

#include <ATen/Functions.h>
#include <zlib.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lockstep/checkpoint/safetensors/safetensors_header.h"
#include "lockstep/checkpoint/safetensors/safetensors_tree.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/checkpoint/tensor_bytes.h"
#include "lockstep/state/digest.h"
#include "lockstep/state/strict_json.h"

namespace lockstep::internal {
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
