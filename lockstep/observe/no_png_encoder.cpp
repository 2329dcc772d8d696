#include <stdexcept>

#include "lockstep/observe/png_encoder.h"

namespace lockstep::internal {

void require_png() {
  throw std::invalid_argument(
      "this build of Lockstep cannot write images: libpng was not found when "
      "it was built; install libpng (Debian: libpng-dev) and build Lockstep "
      "again");
}

std::string encode_png(const uint8_t*, uint32_t, uint32_t, int) {
  require_png();
  return "";
}

}  // namespace lockstep::internal
