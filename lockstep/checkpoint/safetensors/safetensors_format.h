#pragma once

#include <map>
#include <string>

#include "lockstep/checkpoint/disk_file.h"
#include "lockstep/checkpoint/safetensors/safetensors_header.h"
#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// A snapshot as safetensors can hold it: named tensors, and one text.
struct SafetensorsTree {
  // The model's tensors under their own names, all others under "lockstep.", in
  // file form (tensor_bytes.h).
  NamedTensors tensors;
  // Further names of the model's tensors, each with the name under which the
  // snapshot has the tensor: entries of "__metadata__", as those of Python's
  // safetensors.torch.save_model().
  std::map<std::string, std::string> aliases{};
  // JSON with everything that is not a tensor. Empty if the file was not
  // written by Lockstep.
  std::string description;
};

// No name of the model's begins with this, and no key of "__metadata__" that is
// an alias.
inline constexpr const char* kReserved = "lockstep.";

// The key of "__metadata__" that holds the description.
inline constexpr const char* kSnapshotKey = "lockstep.snapshot";

// Throws std::invalid_argument if a name occurs twice, is reserved, or is not
// UTF-8.
SafetensorsTree safetensors_tree_of(const Snapshot& snapshot);

// Throws std::runtime_error (or an error of nlohmann::json) that says what is
// wrong with the description or what is missing.
Snapshot snapshot_of(const SafetensorsTree& tree);

// Reads the tensors of a safetensors file one by one.
class SafetensorsReader {
 public:
  // Reads and checks the header. Throws SnapshotError. `file` must outlive this
  // object.
  explicit SafetensorsReader(const InputFile& file);

  const std::vector<SafetensorsEntry>& entries() const {
    return header_.entries;
  }
  const SafetensorsHeader& header() const { return header_; }
  // Whether the file has a checksum for every tensor, or for none.
  bool has_checksums() const { return has_checksums_; }

  // Reads a tensor and compares its checksum, if there is one. Throws
  // SnapshotError that names the tensor. `sum`, if not null, is set to the
  // CRC-32 of its bytes.
  at::Tensor read(const SafetensorsEntry& entry, uint32_t* sum = nullptr) const;

  // Returns the snapshot that has these tensors, which are those of entries()
  // in that order. Only their names are looked at. Throws SnapshotError.
  Snapshot snapshot_with(std::vector<at::Tensor> tensors) const;

 private:
  const InputFile& file_;
  SafetensorsHeader header_;
  std::map<std::string, uint32_t> sums_;
  bool has_checksums_ = false;
};

// The safetensors format (https://huggingface.co/docs/safetensors, "Format"): 8
// bytes with the length N of the header, little-endian; N bytes of JSON; the
// tensors' bytes without gaps. The model's tensors have Python's names;
// everything else in a snapshot has names that begin with "lockstep."
// (docs/internals/snapshot-formats.md). They throw the errors of
// save_snapshot_file() and load_snapshot_file().
void write_safetensors(AtomicFile& file, const Snapshot& snapshot);
Snapshot read_safetensors(const InputFile& file);

}  // namespace lockstep::internal
