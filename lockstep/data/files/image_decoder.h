#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/data/files/byte_reader.h"

namespace lockstep::internal {

// Where a decoder puts an image: it calls this once, when it knows the size,
// and fills 3 * height * width bytes: the red plane, row by row from the top,
// then the green and the blue one. May throw.
using ImagePlanes = std::function<uint8_t*(size_t height, size_t width)>;

// Decode a whole image of 8 bits per channel to RGB, as Pillow's
// `Image.open(path).convert("RGB")` does:
//
// - Gray becomes three equal channels, alpha is dropped.
// - JPEG (libjpeg-turbo, with its exact transform and its smooth upsampling):
//   CMYK and YCCK are converted; as Pillow, it takes all such files for
//   inverted ones, which Adobe's programs write. EXIF (the orientation) and
//   colour profiles are ignored.
// - PNG (libpng): 16-bit channels keep their high byte. (Pillow does the same
//   for colour, but clips 16-bit gray at 255.) Gamma and colour profiles are
//   ignored.
//
// Sizes are checked before memory is allocated: at most `most_pixels`, and not
// more than a file of this size can hold. Throw DataFileError with the place in
// the file if it is damaged or cut short, if it is neither of the two formats,
// or if this build lacks the library for it. Any thread may call.
void decode_image(const std::string& path, Bytes bytes, uint64_t most_pixels,
                  const ImagePlanes& planes);
void decode_jpeg(const std::string& path, Bytes bytes, uint64_t most_pixels,
                 const ImagePlanes& planes);
void decode_png(const std::string& path, Bytes bytes, uint64_t most_pixels,
                const ImagePlanes& planes);

// Throws DataFileError if height * width is 0 or more than `most_pixels`.
void check_image_size(const std::string& path, uint64_t height, uint64_t width,
                      uint64_t most_pixels);

// Spreads one row of pixels over the planes of `row` (the place of the row in
// the red plane; the others follow at `plane` bytes). `channels` is 1 or 3.
void spread_row(const uint8_t* pixels, size_t width, size_t channels,
                uint8_t* row, size_t plane);

}  // namespace lockstep::internal
