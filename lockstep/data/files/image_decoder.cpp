#include "lockstep/data/files/image_decoder.h"

#include <array>
#include <cstring>

#include "lockstep/data/data_file_error.h"

namespace lockstep::internal {
namespace {

bool begins_with(Bytes bytes, std::span<const uint8_t> magic) {
  return bytes.size() >= magic.size() &&
         std::memcmp(bytes.data(), magic.data(), magic.size()) == 0;
}

}  // namespace

void decode_image(const std::string& path, Bytes bytes, uint64_t most_pixels,
                  const ImagePlanes& planes) {
  constexpr std::array<uint8_t, 3> kJpeg{0xff, 0xd8, 0xff};
  constexpr std::array<uint8_t, 8> kPng{0x89, 'P',  'N',  'G',
                                        '\r', '\n', 0x1a, '\n'};
  if (begins_with(bytes, kJpeg)) {
    decode_jpeg(path, bytes, most_pixels, planes);
  } else if (begins_with(bytes, kPng)) {
    decode_png(path, bytes, most_pixels, planes);
  } else {
    throw DataFileError(
        path, bytes.empty() ? "is empty; a JPEG or a PNG file is expected"
                            : "is neither a JPEG nor a PNG file, as its first "
                              "bytes show; convert it to one of them");
  }
}

void check_image_size(const std::string& path, uint64_t height, uint64_t width,
                      uint64_t most_pixels) {
  // Both formats have 32 bits for a size at most.
  if (height == 0 || width == 0 || height * width > most_pixels) {
    throw DataFileError(path, "claims an image of " + std::to_string(width) +
                                  " x " + std::to_string(height) +
                                  " pixels; 1 to " +
                                  std::to_string(most_pixels) +
                                  " pixels are allowed (max_pixels)");
  }
}

void spread_row(const uint8_t* pixels, size_t width, size_t channels,
                uint8_t* row, size_t plane) {
  if (channels == 1) {
    for (size_t channel = 0; channel < 3; ++channel) {
      std::memcpy(row + channel * plane, pixels, width);
    }
    return;
  }
  for (size_t channel = 0; channel < 3; ++channel) {
    uint8_t* to = row + channel * plane;
    for (size_t x = 0; x < width; ++x) to[x] = pixels[3 * x + channel];
  }
}

}  // namespace lockstep::internal
