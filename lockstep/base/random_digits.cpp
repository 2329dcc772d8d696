#include "lockstep/base/random_digits.h"

#include <sys/random.h>

#include <cstdint>
#include <cstdio>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

std::string random_digits() {
  uint32_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != sizeof random) {
    throw_errno("getrandom for a name");
  }
  char text[9];
  std::snprintf(text, sizeof text, "%08x", random);
  return text;
}

}  // namespace lockstep::internal
