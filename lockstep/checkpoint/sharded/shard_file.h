#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/checkpoint/safetensors/safetensors_header.h"
#include "lockstep/checkpoint/sharded/save_files.h"
#include "lockstep/checkpoint/sharded/save_plan.h"

// One file of a sharded snapshot: a safetensors file as PyTorch's
// HuggingFaceStorageWriter(save_distributed=True) writes it (torch 2.13,
// torch/distributed/checkpoint/hf_storage.py and filesystem.py), with checksums
// of our own in its metadata (docs/internals/snapshot-formats.md).
namespace lockstep::internal {

// A tensor's bytes in a file have one checksum for each block of this size,
// counted from the tensor's first byte; the last block may be shorter. So a
// rank that reads a part of a tensor need not read all of it to verify that
// part, and several threads can verify one tensor.
inline constexpr uint64_t kChecksumBlock = uint64_t{4} << 20;

// Returns "shard-00001-model-00002-of-00003.safetensors" for the first rank's
// second file of three.
std::string shard_file_name(size_t rank, size_t file, size_t files);

struct WrittenFile {
  std::string name;
  uint64_t bytes = 0;
  uint64_t header_checksum = 0;  // XXH3 of all bytes before the tensors
};

// Returns the checksums of a tensor's blocks. Its elements are those of
// file_form() (tensor_bytes.h).
std::vector<uint64_t> block_checksums(const at::Tensor& tensor);
size_t block_count(uint64_t bytes);

// Writes the file `name` in `folder` and blocks until its content is on the
// disk. `metadata`: further entries for the header's metadata. If
// `checksums` is not null, it is set to those of the tensors' blocks, by name,
// in hexadecimal digits.
//
// Elements are written from the tensors' own memory, and their checksums are
// computed on the way, while they are in the processor's cache; the header is
// written last. A tensor that is not contiguous, or not on the CPU, is copied,
// one at a time. Throws std::system_error and std::invalid_argument.
WrittenFile write_shard_file(
    SaveFiles& files, const std::string& folder, const std::string& name,
    std::vector<PlannedEntry> entries,
    std::map<std::string, std::string> metadata,
    std::map<std::string, std::string>* checksums = nullptr);

// The entries for one tensor that a header of ours or of PyTorch's has beyond
// the format.
struct ShardDetails {
  // The place of the entry in the whole tensor. Zeros if the file does not say.
  Sizes offsets;
  // One for each block; empty if the file has none.
  std::vector<uint64_t> checksums;
};

// Returns whether a part with these offsets and sizes can lie in some tensor;
// nothing overflows then.
bool offsets_fit(const Sizes& offsets, const Sizes& sizes);

// Returns the details of header.entries, in that order. Throws
// std::runtime_error (or a JSON error) if they are not what one of the two
// writes.
std::vector<ShardDetails> shard_details(const SafetensorsHeader& header);

// The keys of the header's metadata.
inline constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";
inline constexpr const char* kShardKey = "lockstep.shard";
inline constexpr const char* kShardChecksums = "lockstep.xxh3";

}  // namespace lockstep::internal
