#include "lockstep/checkpoint/safetensors/safetensors_format.h"

#include <ATen/Functions.h>
#include <zlib.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include "lockstep/base/digest.h"
#include "lockstep/checkpoint/safetensors/safetensors_header.h"
#include "lockstep/checkpoint/safetensors/safetensors_tree.h"
#include "lockstep/checkpoint/safetensors/strict_json.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/checkpoint/tensor_bytes.h"

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
  const std::string header = make_header(
      entries, {{kSnapshotKey, tree.description}, {kChecksums, sums.dump()}});
  const uint64_t length = header.size();
  file.write(&length, sizeof length);
  file.write(header.data(), header.size());
  for (const auto& [name, tensor] : tree.tensors) {
    file.write(tensor.data_ptr(), tensor.nbytes());
  }
}

Snapshot read_safetensors(const InputFile& file) {
  const SafetensorsHeader header = read_header(file);
  std::map<std::string, uint32_t> sums;
  try {
    sums = stored_checksums(header);
  } catch (const std::exception& error) {
    throw SnapshotError(
        file.path(),
        std::string("is damaged: its header is invalid: ") + error.what());
  }
  Digest digest;
  digest.add(uint64_t{header.crc32});
  SafetensorsTree tree;
  for (const SafetensorsEntry& entry : header.entries) {
    at::Tensor tensor =
        at::empty(entry.shape, at::TensorOptions().dtype(entry.dtype));
    file.read_at(header.data_offset + entry.begin, tensor.data_ptr(),
                 tensor.nbytes());
    const uint32_t sum = checksum(tensor);
    digest.add(uint64_t{sum});
    if (!sums.empty() && sums.at(entry.name) != sum) {
      throw SnapshotError(file.path(), "is damaged: tensor \"" + entry.name +
                                           "\" does not match its checksum");
    }
    if (!valid_values(tensor.data_ptr(), tensor.nbytes(), entry.dtype)) {
      throw SnapshotError(file.path(),
                          "is damaged: tensor \"" + entry.name +
                              "\" holds a bool that is neither 0 nor 1");
    }
    tree.tensors.emplace_back(entry.name, std::move(tensor));
  }
  if (header.metadata.contains(kSnapshotKey)) {
    tree.description = header.metadata.at(kSnapshotKey);
  }
  try {
    Snapshot snapshot = snapshot_of(tree);
    snapshot.digest = digest.value();
    return snapshot;
  } catch (const std::exception& error) {
    throw SnapshotError(file.path(),
                        std::string("cannot be used: ") + error.what());
  }
}

}  // namespace lockstep::internal
