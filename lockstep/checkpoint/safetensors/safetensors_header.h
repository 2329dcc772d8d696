#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/disk_file.h"

namespace lockstep::internal {

// One entry of the header: a tensor and the place of its bytes, counted from
// the end of the header.
struct SafetensorsEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<int64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// The checked header of a safetensors file, without the content of tensors.
struct SafetensorsHeader {
  // In the order of their bytes; they cover the rest of the file exactly.
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;  // "__metadata__"
  uint64_t data_offset = 0;
  // CRC-32 of the header in canonical form (JSON without blanks, keys sorted),
  // without the entry that stores it.
  uint32_t crc32 = 0;
};

// The key of "__metadata__" that holds this checksum.
inline constexpr const char* kHeaderChecksum = "lockstep.header_crc32";

// Returns the format's name of a dtype: "F32" for Float. Throws
// std::invalid_argument for a dtype that the format lacks.
std::string safetensors_dtype(c10::ScalarType dtype);

// Does the reverse. Throws std::runtime_error for a name that is not known.
c10::ScalarType dtype_of_safetensors(std::string_view name);

// Returns the text of the header, padded to a multiple of 8 bytes and with its
// checksum in the metadata. Throws std::invalid_argument if it is larger than
// kMostHeaderBytes.
std::string make_header(const std::vector<SafetensorsEntry>& entries,
                        const std::map<std::string, std::string>& metadata);

// Returns the text of a header without that checksum; the tensors' bytes begin
// at a multiple of `alignment` bytes in the file. Throws as make_header() does.
std::string make_plain_header(
    const std::vector<SafetensorsEntry>& entries,
    const std::map<std::string, std::string>& metadata, size_t alignment);

// Reads and checks the header. Throws SnapshotError that says what is wrong.
SafetensorsHeader read_header(const InputFile& file);

}  // namespace lockstep::internal
