#pragma once

#include <cstdint>
#include <string>

namespace lockstep::internal {

// Throws std::invalid_argument if this build has no libpng.
void require_png();

// Returns the image as a PNG file. `pixels`: rows from the top, without gaps,
// of `channels` bytes for each pixel: 3 (RGB) or 4 (RGBA, the colours not
// multiplied by alpha). Throws std::runtime_error if libpng fails.
std::string encode_png(const uint8_t* pixels, uint32_t height, uint32_t width,
                       int channels);

}  // namespace lockstep::internal
