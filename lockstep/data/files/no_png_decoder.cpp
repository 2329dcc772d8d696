#include "lockstep/data/data_file_error.h"
#include "lockstep/data/files/image_decoder.h"

namespace lockstep::internal {

void decode_png(const std::string& path, Bytes, uint64_t, const ImagePlanes&) {
  throw DataFileError(
      path,
      "is a PNG file, which this build of Lockstep cannot decode: libpng was "
      "not found when it was built; install libpng (Debian: libpng-dev) and "
      "build Lockstep again");
}

}  // namespace lockstep::internal
