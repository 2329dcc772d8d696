#include "lockstep/data/files/idx_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "lockstep/data/data_file_error.h"
#include "lockstep/data/files/byte_reader.h"

namespace lockstep::internal {
namespace {

static_assert(std::endian::native == std::endian::little);

// As LibTorch: more dimensions make no tensor.
constexpr size_t kMostDimensions = 64;

size_t element_bytes(uint8_t type) {
  switch (static_cast<IdxType>(type)) {
    case IdxType::uint8:
    case IdxType::int8:
      return 1;
    case IdxType::int16:
      return 2;
    case IdxType::int32:
    case IdxType::float32:
      return 4;
    case IdxType::float64:
      return 8;
  }
  return 0;
}

std::string hexadecimal(uint8_t byte) {
  constexpr const char* kDigits = "0123456789abcdef";
  return {'0', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
}

std::string text_of(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  }
  return text + "]";
}

template <class Word>
void copy_swapped(const uint8_t* from, void* to, size_t bytes) {
  auto* out = static_cast<uint8_t*>(to);
  for (size_t at = 0; at < bytes; at += sizeof(Word)) {
    std::reverse_copy(from + at, from + at + sizeof(Word), out + at);
  }
}

}  // namespace

IdxFile::IdxFile(const std::string& path) : path_(path) {
  auto file = std::make_shared<const MappedFile>(path);
  const auto reader = open_bytes(*file);
  const auto read = [&](std::span<uint8_t> to, const char* what) {
    if (reader->read(to) != to.size()) {
      throw DataFileError(path,
                          std::string("ends inside its ") + what +
                              ": it was cut short, or is not an IDX file");
    }
  };
  std::array<uint8_t, 4> magic{};
  read(magic, "first four bytes");
  element_bytes_ = element_bytes(magic[2]);
  if (magic[0] != 0 || magic[1] != 0 || element_bytes_ == 0) {
    std::string found;
    for (const uint8_t byte : magic) found += " " + hexadecimal(byte);
    throw DataFileError(
        path, "is not an IDX file: it begins with the bytes" + found +
                  "; IDX begins with 0x00 0x00 and a type, which is 0x08, "
                  "0x09, 0x0b, 0x0c, 0x0d or 0x0e");
  }
  type_ = static_cast<IdxType>(magic[2]);
  const size_t dimensions = magic[3];
  if (dimensions == 0 || dimensions > kMostDimensions) {
    throw DataFileError(path, "has " + std::to_string(dimensions) +
                                  " dimensions (byte 3); 1 to 64 are allowed");
  }
  // A size of 0 counts as 1 here, so that it does not hide an overflow:
  // strides are products of sizes, too.
  using Wide = unsigned __int128;
  constexpr Wide kMost = std::numeric_limits<int64_t>::max() / 16;
  Wide count = 1;
  bool empty = false;
  for (size_t i = 0; i < dimensions; ++i) {
    std::array<uint8_t, 4> size{};
    read(size, "sizes");
    const uint32_t value = uint32_t{size[0]} << 24 | uint32_t{size[1]} << 16 |
                           uint32_t{size[2]} << 8 | size[3];
    sizes_.push_back(value);
    empty = empty || value == 0;
    count *= std::max<uint32_t>(value, 1);
    if (count > kMost) {
      throw DataFileError(
          path, "claims too many elements: its sizes begin " + text_of(sizes_));
    }
  }
  const auto bytes = empty ? 0 : static_cast<uint64_t>(count) * element_bytes_;
  row_bytes_ = sizes_[0] == 0 ? 0 : static_cast<size_t>(bytes / rows());
  const uint64_t header = 4 + 4 * uint64_t{dimensions};
  const std::string needed = "its sizes " + text_of(sizes_) + " with " +
                             std::to_string(element_bytes_) +
                             " bytes for each element need " +
                             std::to_string(header + bytes) + " bytes";
  const auto cut_short = [&](const std::string& there) {
    return DataFileError(path, needed + ", and " + there +
                                   ": it was cut short, or its header is "
                                   "damaged");
  };
  if (header + bytes > reader->most_bytes()) {
    throw cut_short(is_gzip(file->bytes())
                        ? "no gzip file of " +
                              std::to_string(file->bytes().size()) +
                              " bytes can hold that"
                        : "it has " + std::to_string(file->bytes().size()));
  }
  uint64_t after = 0;  // bytes after the elements
  if (is_gzip(file->bytes())) {
    auto content = std::make_shared<std::vector<uint8_t>>(bytes);
    const size_t got = bytes == 0 ? 0 : reader->read(*content);
    if (got != bytes) throw cut_short("it has " + std::to_string(header + got));
    std::array<uint8_t, 1> more{};
    after = reader->read(more);
    elements_ = content->data();
    owner_ = std::move(content);
  } else {
    after = file->bytes().size() - header - bytes;
    elements_ = file->bytes().data() + header;
    owner_ = std::move(file);
  }
  if (after > 0) {
    throw DataFileError(path, needed + ", but the file goes on after that");
  }
}

void IdxFile::copy_row(size_t row, void* to) const {
  const uint8_t* from = elements_ + row * row_bytes_;
  switch (element_bytes_) {
    case 1:
      if (row_bytes_ > 0) std::memcpy(to, from, row_bytes_);
      break;
    case 2:
      copy_swapped<uint16_t>(from, to, row_bytes_);
      break;
    case 4:
      copy_swapped<uint32_t>(from, to, row_bytes_);
      break;
    default:
      copy_swapped<uint64_t>(from, to, row_bytes_);
  }
}

}  // namespace lockstep::internal
