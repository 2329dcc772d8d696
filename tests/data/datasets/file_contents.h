#pragma once

#include <zlib.h>

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>

// Contents of files for the tests of this folder: compressed, and damaged.
namespace lockstep::internal::testing {

// Returns `content` as one member of a gzip file.
inline std::string gzipped(const std::string& content) {
  z_stream stream{};
  ::deflateInit2(&stream, 9, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  std::string packed(::deflateBound(&stream, content.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
  stream.avail_in = static_cast<uInt>(content.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  ::deflate(&stream, Z_FINISH);
  packed.resize(stream.total_out);
  ::deflateEnd(&stream);
  return packed;
}

// Returns a safetensors file with this header and these bytes of tensors.
inline std::string safetensors(const std::string& header,
                               const std::string& bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) +
         header + bytes;
}

// Calls use(content) for every beginning of `content`, and for `count` copies
// in which one to four bytes are different. Returns how many of the beginnings
// (without the whole) did not throw. What use() throws must be a std::exception
// with one line.
template <class Use>
size_t for_damaged(const std::string& content, int count, Use&& use) {
  const auto survives = [&](const std::string& damaged) {
    try {
      use(damaged);
    } catch (const std::exception& error) {
      if (std::string(error.what()).find('\n') != std::string::npos) {
        throw std::logic_error("an error of several lines");
      }
      return false;
    }
    return true;
  };
  size_t survived = 0;
  for (size_t size = 0; size < content.size(); ++size) {
    if (survives(content.substr(0, size))) ++survived;
  }
  std::mt19937 random(content.size());
  for (int i = 0; i < count; ++i) {
    std::string damaged = content;
    for (size_t flips = 1 + random() % 4; flips > 0; --flips) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    survives(damaged);
  }
  return survived;
}

}  // namespace lockstep::internal::testing
