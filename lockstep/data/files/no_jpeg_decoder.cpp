#include "lockstep/data/data_file_error.h"
#include "lockstep/data/files/image_decoder.h"

namespace lockstep::internal {

void decode_jpeg(const std::string& path, Bytes, uint64_t, const ImagePlanes&) {
  throw DataFileError(
      path,
      "is a JPEG file, which this build of Lockstep cannot decode: libjpeg was "
      "not found when it was built; install libjpeg (Debian: "
      "libjpeg-dev) and build Lockstep again");
}

}  // namespace lockstep::internal
