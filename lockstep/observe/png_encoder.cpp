#include "lockstep/observe/png_encoder.h"

#include <png.h>

#include <stdexcept>

namespace lockstep::internal {

void require_png() {}

std::string encode_png(const uint8_t* pixels, uint32_t height, uint32_t width,
                       int channels) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.height = height;
  image.width = width;
  image.format = channels == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_RGBA;
  // As much as the file can have, so that it is compressed only once.
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(image);
  std::string file(size, '\0');
  if (::png_image_write_to_memory(&image, file.data(), &size,
                                  /*convert_to_8bit=*/0, pixels,
                                  /*row_stride=*/0, nullptr) == 0) {
    throw std::runtime_error(std::string("libpng cannot encode an image: ") +
                             image.message);
  }
  file.resize(size);
  return file;
}

}  // namespace lockstep::internal
