#include "lockstep/data/files/safetensors_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "lockstep/data/data_file_error.h"

namespace lockstep::internal {

static_assert(std::endian::native == std::endian::little);

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  const Bytes bytes = file_.bytes();
  const auto refuse = [&](const std::string& why) {
    return DataFileError(path, "is damaged, or no safetensors file: " + why);
  };
  uint64_t length = 0;
  if (bytes.size() < sizeof length) {
    throw refuse("it has " + std::to_string(bytes.size()) +
                 " bytes, and 8 with the length of its header are needed");
  }
  std::memcpy(&length, bytes.data(), sizeof length);
  const size_t rest = bytes.size() - sizeof length;
  if (length > std::min<uint64_t>(rest, kMostHeaderBytes)) {
    throw refuse("it claims a header of " + std::to_string(length) +
                 " bytes; there are " + std::to_string(rest) +
                 ", and at most 100,000,000 are allowed");
  }
  const auto header = static_cast<size_t>(length);
  const std::string_view text(
      reinterpret_cast<const char*>(bytes.data()) + sizeof length, header);
  try {
    content_ = parse_safetensors_header(text, rest - header);
  } catch (const std::runtime_error& error) {
    throw refuse(std::string("its header is invalid: ") + error.what());
  }
  data_ = bytes.data() + sizeof length + header;
}

const SafetensorsTensor* SafetensorsFile::find(const std::string& name) const {
  const auto found =
      std::find_if(content_.tensors.begin(), content_.tensors.end(),
                   [&](const auto& tensor) { return tensor.name == name; });
  return found == content_.tensors.end() ? nullptr : &*found;
}

std::string SafetensorsFile::names() const {
  constexpr size_t kMost = 10;
  const auto& tensors = content_.tensors;
  std::string names = tensors.empty() ? "none" : "";
  for (size_t i = 0; i < std::min(kMost, tensors.size()); ++i) {
    names += (i > 0 ? ", " : "") + quoted_name(tensors[i].name);
  }
  return names + (tensors.size() > kMost ? ", ..." : "");
}

}  // namespace lockstep::internal
