#include "lockstep/base/random_digits.h"

#include <sys/random.h>

#include <array>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

std::string random_digits(size_t count) {
  std::array<unsigned char, 256> bytes;  // getrandom() gives these at once
  if (::getrandom(bytes.data(), count / 2, 0) !=
      static_cast<ssize_t>(count / 2)) {
    throw_errno("getrandom");
  }
  std::string text;
  for (size_t i = 0; i < count / 2; ++i) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += {kDigits[bytes[i] >> 4], kDigits[bytes[i] & 15]};
  }
  return text;
}

}  // namespace lockstep::internal
