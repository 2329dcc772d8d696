#include "lockstep/checkpoint/safetensors/safetensors_header.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "lockstep/checkpoint/safetensors/safetensors_format.h"
#include "lockstep/checkpoint/safetensors/strict_json.h"
#include "lockstep/checkpoint/snapshot_error.h"

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

constexpr const char* kMetadata = "__metadata__";
// Levels of nesting: the header, a tensor's entry, its list of numbers.
constexpr int kDepth = 4;
constexpr size_t kMostDimensions = 64;

struct NamedDtype {
  const char* name;
  c10::ScalarType dtype;
};
constexpr std::array<NamedDtype, 16> kDtypes{{
    {"F64", c10::ScalarType::Double},
    {"F32", c10::ScalarType::Float},
    {"F16", c10::ScalarType::Half},
    {"BF16", c10::ScalarType::BFloat16},
    {"F8_E5M2", c10::ScalarType::Float8_e5m2},
    {"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
    {"I64", c10::ScalarType::Long},
    {"I32", c10::ScalarType::Int},
    {"I16", c10::ScalarType::Short},
    {"I8", c10::ScalarType::Char},
    {"U64", c10::ScalarType::UInt64},
    {"U32", c10::ScalarType::UInt32},
    {"U16", c10::ScalarType::UInt16},
    {"U8", c10::ScalarType::Byte},
    {"BOOL", c10::ScalarType::Bool},
    {"C64", c10::ScalarType::ComplexFloat},
}};

// Returns the checksum of the header's canonical text: Json sorts keys and
// writes no blanks.
uint32_t checksum(Json header) {
  if (header.contains(kMetadata)) header[kMetadata].erase(kHeaderChecksum);
  const std::string text = header.dump();
  return static_cast<uint32_t>(
      ::crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size()));
}

// Reads the JSON of one tensor; throws std::runtime_error or Json::exception.
SafetensorsEntry entry_of(const std::string& name, const Json& json) {
  if (!json.is_object() || json.size() != 3) {
    throw std::runtime_error("it needs dtype, shape and data_offsets");
  }
  const auto number = [](const Json& value) {
    if (!value.is_number_unsigned()) {
      throw std::runtime_error(
          "a size or offset is not an integer of 0 or more");
    }
    return value.get<uint64_t>();
  };
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = dtype_of_safetensors(json.at("dtype").get<std::string>());
  const Json& shape = json.at("shape");
  const Json& offsets = json.at("data_offsets");
  if (!shape.is_array() || shape.size() > kMostDimensions ||
      !offsets.is_array() || offsets.size() != 2) {
    throw std::runtime_error("shape or data_offsets is not a valid list");
  }
  // A size of 0 counts as 1 here, so that it does not hide an overflow: strides
  // are products of sizes, too.
  using Wide = unsigned __int128;
  constexpr Wide kMost = std::numeric_limits<int64_t>::max() / 16;
  Wide count = 1;
  bool empty = false;
  for (const Json& item : shape) {
    const uint64_t size = number(item);
    empty = empty || size == 0;
    count *= std::max<uint64_t>(size, 1);
    if (count > kMost) throw std::runtime_error("its shape is too large");
    entry.shape.push_back(static_cast<int64_t>(size));
  }
  entry.begin = number(offsets[0]);
  entry.end = number(offsets[1]);
  const Wide bytes = empty ? 0 : count * c10::elementSize(entry.dtype);
  if (entry.end < entry.begin || entry.end - entry.begin != bytes) {
    throw std::runtime_error("its data_offsets do not fit dtype and shape");
  }
  return entry;
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
        " bytes, but safetensors allows only 100,000,000; name the snapshot "
        ".pt");
  }
  return text;
}

void check_coverage(std::vector<SafetensorsEntry>& entries,
                    uint64_t data_size) {
  std::sort(entries.begin(), entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              return std::tie(a.begin, a.end, a.name) <
                     std::tie(b.begin, b.end, b.name);
            });
  uint64_t covered = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != covered) {
      throw std::runtime_error("tensor \"" + entry.name +
                               "\" overlaps another or leaves a gap");
    }
    covered = entry.end;
  }
  if (covered > data_size) {
    throw std::runtime_error("its tensors need " + std::to_string(covered) +
                             " bytes and " + std::to_string(data_size) +
                             " are there, so it was cut short");
  }
  if (covered < data_size) {
    throw std::runtime_error("it has bytes that belong to no tensor");
  }
}

}  // namespace

std::string safetensors_dtype(c10::ScalarType dtype) {
  for (const NamedDtype& known : kDtypes) {
    if (known.dtype == dtype) return known.name;
  }
  throw std::invalid_argument(std::string("a tensor of dtype ") +
                              c10::toString(dtype) +
                              " cannot be saved as safetensors; convert it, or "
                              "name the snapshot .pt");
}

c10::ScalarType dtype_of_safetensors(std::string_view name) {
  for (const NamedDtype& known : kDtypes) {
    if (known.name == name) return known.dtype;
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
    const Json json = parse_strict_json(
        file.read_text(sizeof length, static_cast<size_t>(length)), kDepth);
    if (!json.is_object()) throw std::runtime_error("it is not an object");
    for (const auto& [name, value] : json.items()) {
      if (name == kMetadata) {
        header.metadata = value.get<std::map<std::string, std::string>>();
        continue;
      }
      try {
        header.entries.push_back(entry_of(name, value));
      } catch (const std::exception& error) {
        throw std::runtime_error("tensor \"" + name + "\": " + error.what());
      }
    }
    check_coverage(header.entries, file.size() - header.data_offset);
    header.crc32 = checksum(json);
  } catch (const Json::exception&) {
    throw refuse("its header has a value of a wrong type");
  } catch (const std::runtime_error& error) {
    throw refuse(std::string("its header is invalid: ") + error.what());
  }
  return header;
}

}  // namespace lockstep::internal
