#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// The header of a safetensors file (https://huggingface.co/docs/
// safetensors, "Format"). A file is 8 bytes with the length N of the header,
// little-endian; N bytes of JSON; the tensors' bytes without gaps.
namespace lockstep::internal {

// The reference implementation's limit for N.
inline constexpr uint64_t kMostHeaderBytes = 100'000'000;

struct SafetensorsDtype {
  const char* name;        // of the format: "F32"
  const char* torch_name;  // what c10::toString() returns: "Float"
  size_t bytes;            // of an element
};

// Returns all dtypes that are known.
std::span<const SafetensorsDtype> safetensors_dtypes();

// One tensor and the place of its bytes, counted from the end of the header.
struct SafetensorsTensor {
  std::string name;
  const SafetensorsDtype* dtype = nullptr;
  std::vector<int64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct SafetensorsContent {
  // In the order of their bytes; they cover what follows the header exactly.
  std::vector<SafetensorsTensor> tensors;
  std::map<std::string, std::string> metadata;  // "__metadata__"
};

// Returns a tensor's name in quotes, for errors: on one line whatever is in it.
std::string quoted_name(const std::string& name);

// Reads and checks the JSON of a header that `data_bytes` bytes follow. Throws
// std::runtime_error that says what is wrong with it.
SafetensorsContent parse_safetensors_header(std::string_view text,
                                            uint64_t data_bytes);

}  // namespace lockstep::internal
