#include "lockstep/checkpoint/safetensors/safetensors_header.h"

#include <zlib.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "lockstep/checkpoint/pt/pickle.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/state/safetensors_header.h"

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

constexpr const char* kMetadata = "__metadata__";

c10::ScalarType scalar_type(const SafetensorsDtype& dtype) {
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    const auto type = static_cast<c10::ScalarType>(i);
    if (c10::toString(type) == std::string_view(dtype.torch_name)) return type;
  }
  throw std::runtime_error(std::string("this LibTorch has no dtype ") +
                           dtype.torch_name);
}

// Returns the checksum of the header's canonical text: Json sorts keys and
// writes no blanks.
uint32_t checksum(Json header) {
  header[kMetadata].erase(kHeaderChecksum);
  const std::string text = header.dump();
  return static_cast<uint32_t>(
      ::crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size()));
}

Json json_of(const std::vector<SafetensorsEntry>& entries,
             const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  for (const SafetensorsEntry& entry : entries) {
    header[entry.name] = {{"dtype", safetensors_dtype(entry.dtype)},
                          {"shape", entry.shape},
                          {"data_offsets", {entry.begin, entry.end}}};
  }
  header[kMetadata] = metadata;
  return header;
}

// Returns the text with so many blanks that what follows it in the file, after
// the eight bytes of its length, begins at a multiple of `alignment`.
std::string padded(const Json& header, size_t alignment) {
  std::string text = header.dump();
  constexpr size_t kLength = sizeof(uint64_t);
  const size_t end = (text.size() + kLength + alignment - 1) / alignment;
  text.resize(end * alignment - kLength, ' ');
  if (text.size() > kMostHeaderBytes) {
    throw std::invalid_argument(
        "the names and metadata of this snapshot take " +
        std::to_string(text.size()) +
        " bytes, but safetensors allows only 100,000,000; store large text in "
        "a "
        "file of its own, and its name in the snapshot");
  }
  return text;
}

}  // namespace

std::string safetensors_dtype(c10::ScalarType dtype) {
  for (const SafetensorsDtype& known : safetensors_dtypes()) {
    if (c10::toString(dtype) == std::string_view(known.torch_name)) {
      return known.name;
    }
  }
  const bool pt_has_it = std::ranges::any_of(
      kPickledDtypes,
      [&](const PickledDtype& known) { return known.dtype == dtype; });
  throw std::invalid_argument(std::string("a tensor of dtype ") +
                              c10::toString(dtype) +
                              " cannot be saved as safetensors; convert it" +
                              (pt_has_it ? ", or name the snapshot .pt" : ""));
}

c10::ScalarType dtype_of_safetensors(std::string_view name) {
  for (const SafetensorsDtype& known : safetensors_dtypes()) {
    if (known.name == name) return scalar_type(known);
  }
  throw std::runtime_error("dtype " + std::string(name) + " is not known");
}

std::string make_header(const std::vector<SafetensorsEntry>& entries,
                        const std::map<std::string, std::string>& metadata) {
  Json header = json_of(entries, metadata);
  header[kMetadata][kHeaderChecksum] = std::to_string(checksum(header));
  return padded(header, 8);
}

std::string make_plain_header(
    const std::vector<SafetensorsEntry>& entries,
    const std::map<std::string, std::string>& metadata, size_t alignment) {
  return padded(json_of(entries, metadata), alignment);
}

SafetensorsHeader read_header(const InputFile& file) {
  uint64_t length = 0;
  file.read_at(0, &length, sizeof length);
  const auto refuse = [&](const std::string& why) -> SnapshotError {
    return SnapshotError(file.path(), "is damaged: " + why);
  };
  if (length > kMostHeaderBytes) {
    throw refuse("it claims a header of " + std::to_string(length) +
                 " bytes; at most 100,000,000 are allowed");
  }
  if (length > file.size() - sizeof length) {
    throw refuse("its header does not fit the file, so it was cut short");
  }
  SafetensorsHeader header;
  header.data_offset = sizeof length + length;
  try {
    SafetensorsContent content = parse_safetensors_header(
        file.read_text(sizeof length, static_cast<size_t>(length)),
        file.size() - header.data_offset);
    for (SafetensorsTensor& tensor : content.tensors) {
      header.entries.push_back(
          {std::move(tensor.name), scalar_type(*tensor.dtype),
           std::move(tensor.shape), tensor.begin, tensor.end});
    }
    header.metadata = std::move(content.metadata);
  } catch (const std::runtime_error& error) {
    throw refuse(std::string("its header is invalid: ") + error.what());
  }
  header.crc32 = checksum(json_of(header.entries, header.metadata));
  return header;
}

}  // namespace lockstep::internal
