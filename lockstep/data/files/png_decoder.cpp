#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <new>
#include <vector>

#include "lockstep/data/data_file_error.h"
#include "lockstep/data/files/image_decoder.h"

namespace lockstep::internal {
namespace {

// Errors are a longjmp to the last guard(), as in jpeg_decoder.cpp.
class PngDecoder {
 public:
  PngDecoder(const std::string& path, Bytes bytes)
      : path_(path), bytes_(bytes) {
    png_ = ::png_create_read_struct(
        PNG_LIBPNG_VER_STRING, this,
        [](png_structp png, png_const_charp message) {
          static_cast<PngDecoder*>(::png_get_error_ptr(png))->fail(message);
        },
        [](png_structp, png_const_charp) {});
    info_ = png_ ? ::png_create_info_struct(png_) : nullptr;
    if (!info_) {
      ::png_destroy_read_struct(&png_, nullptr, nullptr);
      throw std::bad_alloc();
    }
    ::png_set_read_fn(
        png_, this, [](png_structp png, png_bytep to, size_t count) {
          static_cast<PngDecoder*>(::png_get_io_ptr(png))->read(to, count);
        });
  }
  ~PngDecoder() { ::png_destroy_read_struct(&png_, &info_, nullptr); }
  PngDecoder(const PngDecoder&) = delete;
  PngDecoder& operator=(const PngDecoder&) = delete;

  void decode(uint64_t most_pixels, const ImagePlanes& planes) {
    guard([&] { ::png_read_info(png_, info_); });
    const size_t height = ::png_get_image_height(png_, info_);
    const size_t width = ::png_get_image_width(png_, info_);
    check_image_size(path_, height, width, most_pixels);
    const size_t bits = size_t{::png_get_bit_depth(png_, info_)} *
                        ::png_get_channels(png_, info_);
    // Deflate makes at most 1032 bytes of one.
    if (height * width / 8 * bits / 1032 > bytes_.size()) {
      throw DataFileError(path_, "claims an image of " + std::to_string(width) +
                                     " x " + std::to_string(height) +
                                     " pixels, but a PNG file of " +
                                     std::to_string(bytes_.size()) +
                                     " bytes cannot hold so many");
    }
    int passes = 1;
    guard([&] { passes = choose_colours(); });
    const size_t channels = ::png_get_channels(png_, info_);
    const size_t row_bytes = ::png_get_rowbytes(png_, info_);
    if ((channels != 1 && channels != 3) || row_bytes != width * channels) {
      throw DataFileError(path_, "has a kind of pixels that is not known");
    }
    uint8_t* red = planes(height, width);
    // Interlaced: each pass adds pixels to rows of the passes before it.
    const bool whole = passes > 1;
    std::vector<uint8_t> pixels(whole ? height * row_bytes : row_bytes);
    for (int pass = 0; pass < passes; ++pass) {
      for (size_t y = 0; y < height; ++y) {
        uint8_t* row = pixels.data() + (whole ? y * row_bytes : 0);
        guard([&] { ::png_read_row(png_, row, nullptr); });
        if (pass + 1 < passes) continue;
        spread_row(row, width, channels, red + y * width, height * width);
      }
    }
    // Compares the last checksums.
    guard([&] { ::png_read_end(png_, nullptr); });
  }

 private:
  // Runs calls of libpng; throws DataFileError if one fails.
  template <class Calls>
  void guard(Calls calls) {
    if (setjmp(jump_) == 0) {
      calls();
      return;
    }
    throw DataFileError(path_, "is damaged or cut short near byte " +
                                   std::to_string(consumed_) + ": " + message_);
  }

  [[noreturn]] void fail(const char* message) {
    std::snprintf(message_, sizeof message_, "%s", message);
    std::longjmp(jump_, 1);
  }

  void read(uint8_t* to, size_t count) {
    if (count > bytes_.size() - consumed_) {
      fail("the file ends before the image does");
    }
    if (count > 0) std::memcpy(to, bytes_.data() + consumed_, count);
    consumed_ += count;
  }

  // Asks for 8-bit gray or RGB; returns the number of passes.
  int choose_colours() {
    const int type = ::png_get_color_type(png_, info_);
    if (type == PNG_COLOR_TYPE_PALETTE) ::png_set_palette_to_rgb(png_);
    if (type == PNG_COLOR_TYPE_GRAY) ::png_set_expand_gray_1_2_4_to_8(png_);
    ::png_set_strip_16(png_);
    ::png_set_strip_alpha(png_);
    const int passes = ::png_set_interlace_handling(png_);
    ::png_read_update_info(png_, info_);
    return passes;
  }

  const std::string& path_;
  const Bytes bytes_;
  size_t consumed_ = 0;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  std::jmp_buf jump_{};
  char message_[200]{};
};

}  // namespace

void decode_png(const std::string& path, Bytes bytes, uint64_t most_pixels,
                const ImagePlanes& planes) {
  PngDecoder(path, bytes).decode(most_pixels, planes);
}

}  // namespace lockstep::internal
