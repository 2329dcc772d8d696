#include "lockstep/observe/crc32c.h"

#include <array>
#include <cstddef>

namespace lockstep::internal {
namespace {

// kTable[k][b]: what byte b, followed by k zero bytes, does to the register.
constexpr size_t kSlices = 8;
constexpr auto kTable = [] {
  constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected
  std::array<std::array<uint32_t, 256>, kSlices> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
    }
    table[0][byte] = value;
  }
  for (size_t slice = 1; slice < kSlices; ++slice) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = table[slice - 1][byte];
      table[slice][byte] = before >> 8 ^ table[0][before & 0xff];
    }
  }
  return table;
}();

uint32_t four_bytes(const char* bytes) {
  uint32_t value = 0;
  for (int at = 3; at >= 0; --at) {
    value = value << 8 | static_cast<unsigned char>(bytes[at]);
  }
  return value;
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = 0xffffffff;
  // Eight bytes at a time ("slicing"): the lookups do not wait for each other.
  while (bytes.size() >= kSlices) {
    const uint32_t low = crc ^ four_bytes(bytes.data());
    const uint32_t high = four_bytes(bytes.data() + 4);
    crc = kTable[7][low & 0xff] ^ kTable[6][low >> 8 & 0xff] ^
          kTable[5][low >> 16 & 0xff] ^ kTable[4][low >> 24] ^
          kTable[3][high & 0xff] ^ kTable[2][high >> 8 & 0xff] ^
          kTable[1][high >> 16 & 0xff] ^ kTable[0][high >> 24];
    bytes.remove_prefix(kSlices);
  }
  for (const char byte : bytes) {
    crc = crc >> 8 ^ kTable[0][(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  }
  return ~crc;
}

}  // namespace lockstep::internal
