#include "lockstep/checkpoint/sharded/checksum.h"

// The implementation is inlined here, so a program needs no library for it.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace lockstep::internal {

uint64_t xxh3(const void* data, size_t size) { return XXH3_64bits(data, size); }

// The library's state must be aligned to 64 bytes; new does that for a type
// that says so.
struct Xxh3::State {
  XXH3_state_t state;
};

Xxh3::Xxh3() : state_(std::make_unique<State>()) { reset(); }
Xxh3::~Xxh3() = default;
Xxh3::Xxh3(Xxh3&&) noexcept = default;
Xxh3& Xxh3::operator=(Xxh3&&) noexcept = default;

void Xxh3::add(const void* data, size_t size) {
  XXH3_64bits_update(&state_->state, data, size);
}

uint64_t Xxh3::value() const { return XXH3_64bits_digest(&state_->state); }

void Xxh3::reset() { XXH3_64bits_reset(&state_->state); }

std::string hex_of(uint64_t checksum) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text(16, '0');
  for (auto digit = text.rbegin(); digit != text.rend(); ++digit) {
    *digit = kDigits[checksum & 15];
    checksum >>= 4;
  }
  return text;
}

std::optional<uint64_t> checksum_of(std::string_view text) {
  if (text.size() != 16) return std::nullopt;
  uint64_t value = 0;
  for (const char digit : text) {
    if (digit >= '0' && digit <= '9') {
      value = value << 4 | static_cast<uint64_t>(digit - '0');
    } else if (digit >= 'a' && digit <= 'f') {
      value = value << 4 | static_cast<uint64_t>(digit - 'a' + 10);
    } else {
      return std::nullopt;
    }
  }
  return value;
}

}  // namespace lockstep::internal
