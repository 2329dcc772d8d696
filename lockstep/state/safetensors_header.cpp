#include "lockstep/state/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <tuple>

#include "lockstep/state/strict_json.h"

namespace lockstep::internal {
namespace {

using Json = nlohmann::json;

// Levels of nesting: the header, a tensor's entry, its list of numbers.
constexpr int kDepth = 4;
constexpr size_t kMostDimensions = 64;

constexpr std::array<SafetensorsDtype, 19> kDtypes{{
    {"F64", "Double", 8},
    {"F32", "Float", 4},
    {"F16", "Half", 2},
    {"BF16", "BFloat16", 2},
    {"F8_E5M2", "Float8_e5m2", 1},
    {"F8_E4M3", "Float8_e4m3fn", 1},
    {"F8_E5M2FNUZ", "Float8_e5m2fnuz", 1},
    {"F8_E4M3FNUZ", "Float8_e4m3fnuz", 1},
    {"F8_E8M0", "Float8_e8m0fnu", 1},
    {"I64", "Long", 8},
    {"I32", "Int", 4},
    {"I16", "Short", 2},
    {"I8", "Char", 1},
    {"U64", "UInt64", 8},
    {"U32", "UInt32", 4},
    {"U16", "UInt16", 2},
    {"U8", "Byte", 1},
    {"BOOL", "Bool", 1},
    {"C64", "ComplexFloat", 8},
}};

const SafetensorsDtype* dtype_of(const std::string& name) {
  for (const SafetensorsDtype& known : kDtypes) {
    if (known.name == name) return &known;
  }
  throw std::runtime_error("dtype " + quoted_name(name) + " is not known");
}

uint64_t number_of(const Json& value) {
  if (!value.is_number_unsigned()) {
    throw std::runtime_error("a size or offset is not an integer of 0 or more");
  }
  return value.get<uint64_t>();
}

// Reads the JSON of one tensor; throws std::runtime_error or Json::exception.
SafetensorsTensor tensor_of(const std::string& name, const Json& json) {
  if (!json.is_object() || json.size() != 3) {
    throw std::runtime_error("it needs dtype, shape and data_offsets");
  }
  SafetensorsTensor tensor;
  tensor.name = name;
  tensor.dtype = dtype_of(json.at("dtype").get<std::string>());
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
    const uint64_t size = number_of(item);
    empty = empty || size == 0;
    count *= std::max<uint64_t>(size, 1);
    if (count > kMost) throw std::runtime_error("its shape is too large");
    tensor.shape.push_back(static_cast<int64_t>(size));
  }
  tensor.begin = number_of(offsets[0]);
  tensor.end = number_of(offsets[1]);
  const Wide bytes = empty ? 0 : count * tensor.dtype->bytes;
  if (tensor.end < tensor.begin || tensor.end - tensor.begin != bytes) {
    throw std::runtime_error("its data_offsets do not fit dtype and shape");
  }
  return tensor;
}

void check_coverage(std::vector<SafetensorsTensor>& tensors,
                    uint64_t data_bytes) {
  std::sort(tensors.begin(), tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return std::tie(a.begin, a.end, a.name) <
                     std::tie(b.begin, b.end, b.name);
            });
  uint64_t covered = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    if (tensor.begin != covered) {
      throw std::runtime_error("tensor " + quoted_name(tensor.name) +
                               " overlaps another or leaves a gap");
    }
    covered = tensor.end;
  }
  if (covered > data_bytes) {
    throw std::runtime_error("its tensors need " + std::to_string(covered) +
                             " bytes and it has " + std::to_string(data_bytes) +
                             ", so it was cut short");
  }
  if (covered < data_bytes) {
    throw std::runtime_error("it has bytes that belong to no tensor");
  }
}

}  // namespace

std::span<const SafetensorsDtype> safetensors_dtypes() { return kDtypes; }

std::string quoted_name(const std::string& name) {
  return Json(name).dump(-1, ' ', false, Json::error_handler_t::replace);
}

SafetensorsContent parse_safetensors_header(std::string_view text,
                                            uint64_t data_bytes) {
  const Json json = parse_strict_json(text, kDepth);
  if (!json.is_object()) throw std::runtime_error("it is not an object");
  SafetensorsContent content;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      try {
        content.metadata = value.get<std::map<std::string, std::string>>();
      } catch (const Json::exception&) {
        throw std::runtime_error("its metadata has a value of a wrong type");
      }
      continue;
    }
    try {
      content.tensors.push_back(tensor_of(name, value));
    } catch (const std::exception& error) {
      throw std::runtime_error("tensor " + quoted_name(name) + ": " +
                               error.what());
    }
  }
  check_coverage(content.tensors, data_bytes);
  return content;
}

}  // namespace lockstep::internal
