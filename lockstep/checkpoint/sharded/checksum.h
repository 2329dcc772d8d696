#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::internal {

// XXH3 with 64 bits (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), seed 0.
// It finds damage, at about the speed at which memory is read; it does not
// protect against forgery.
uint64_t xxh3(const void* data, size_t size);
inline uint64_t xxh3(std::string_view text) {
  return xxh3(text.data(), text.size());
}

// The same over bytes that come in several parts. Use from one thread.
class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  Xxh3(Xxh3&&) noexcept;
  Xxh3& operator=(Xxh3&&) noexcept;

  void add(const void* data, size_t size);
  uint64_t value() const;
  // Begins again without bytes.
  void reset();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Files have checksums as 16 lower-case hexadecimal digits, most significant
// first (the canonical form of the xxHash specification).
std::string hex_of(uint64_t checksum);
// Returns nothing if `text` is not 16 such digits.
std::optional<uint64_t> checksum_of(std::string_view text);

}  // namespace lockstep::internal
