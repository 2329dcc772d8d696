#include "lockstep/checkpoint/sharded/checksum.h"

#include "lockstep/checkpoint/sharded/xxh3_functions.h"

namespace lockstep::internal {
namespace {

// Returns the functions for this machine. All give the same checksums.
const Xxh3Functions& functions() {
#if defined(__x86_64__)
  static const Xxh3Functions& best =
      __builtin_cpu_supports("avx2") ? kXxh3Avx2 : kXxh3Base;
  return best;
#else
  return kXxh3Base;
#endif
}

}  // namespace

uint64_t xxh3(const void* data, size_t size) {
  return functions().hash(data, size);
}

struct alignas(64) Xxh3::State {
  unsigned char bytes[kXxh3StateSize];
};

Xxh3::Xxh3() : state_(std::make_unique<State>()) { reset(); }
Xxh3::~Xxh3() = default;
Xxh3::Xxh3(Xxh3&&) noexcept = default;
Xxh3& Xxh3::operator=(Xxh3&&) noexcept = default;

void Xxh3::add(const void* data, size_t size) {
  functions().update(state_->bytes, data, size);
}

uint64_t Xxh3::value() const { return functions().digest(state_->bytes); }

void Xxh3::reset() { functions().reset(state_->bytes); }

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
