// stdio.h must come first: jpeglib.h uses its names and does not include it.
#include <cstdio>

// Then libjpeg.
#include <jpeglib.h>

#include <csetjmp>
#include <vector>

#include "lockstep/data/data_file_error.h"
#include "lockstep/data/files/image_decoder.h"

namespace lockstep::internal {
namespace {

// libjpeg goes through the whole image for each scan of a progressive file, and
// a scan may take a few bytes. Encoders write about ten.
constexpr int kMostScans = 500;

// libjpeg reports an error by a call that must not return. It is a longjmp to
// the last guard(), which only frames of C and of the guarded lambdas lie
// between; none of them has anything to destroy. So no C++ exception passes
// through C code, which may have been compiled without tables for it.
class JpegDecoder {
 public:
  JpegDecoder(const std::string& path, Bytes bytes)
      : path_(path), size_(bytes.size()) {
    info_.err = ::jpeg_std_error(&errors_);
    info_.client_data = this;
    errors_.error_exit = [](j_common_ptr info) {
      auto* self = static_cast<JpegDecoder*>(info->client_data);
      (*info->err->format_message)(info, self->message_);
      std::longjmp(self->jump_, 1);
    };
    // Pillow ignores what libjpeg only warns of (bytes between markers, for
    // example), except the end of the data.
    errors_.emit_message = [](j_common_ptr, int) {};
    guard([&] {
      jpeg_create_decompress(&info_);
      set_source(bytes);
      info_.progress = &progress_;
    });
    progress_.progress_monitor = [](j_common_ptr info) {
      auto* self = static_cast<JpegDecoder*>(info->client_data);
      if (self->info_.input_scan_number > kMostScans) {
        std::snprintf(self->message_, sizeof self->message_,
                      "it has more than %d scans", kMostScans);
        std::longjmp(self->jump_, 1);
      }
    };
  }
  ~JpegDecoder() { ::jpeg_destroy_decompress(&info_); }
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  void decode(uint64_t most_pixels, const ImagePlanes& planes) {
    guard([&] { ::jpeg_read_header(&info_, TRUE); });
    choose_colours();
    const size_t height = info_.image_height;
    const size_t width = info_.image_width;
    check_image_size(path_, height, width, most_pixels);
    // Each block of 8 x 8 pixels takes one bit or more; arithmetic coding,
    // which is rare, can do with less.
    if (!info_.arith_code && height * width / 512 > size_) {
      throw DataFileError(
          path_, "claims an image of " + std::to_string(width) + " x " +
                     std::to_string(height) + " pixels, but a JPEG file of " +
                     std::to_string(size_) + " bytes cannot hold so many");
    }
    uint8_t* red = planes(height, width);
    guard([&] { ::jpeg_start_decompress(&info_); });
    std::vector<uint8_t> pixels(width * 4);
    JSAMPROW row = pixels.data();
    for (size_t y = 0; y < height; ++y) {
      guard([&] { ::jpeg_read_scanlines(&info_, &row, 1); });
      size_t channels = static_cast<size_t>(info_.output_components);
      if (channels == 4) {
        convert_cmyk(pixels.data(), width);
        channels = 3;
      }
      spread_row(pixels.data(), width, channels, red + y * width,
                 height * width);
    }
    // Goes on to the marker that ends the image.
    guard([&] { ::jpeg_finish_decompress(&info_); });
  }

 private:
  // Runs calls of libjpeg; throws DataFileError if one fails.
  template <class Calls>
  void guard(Calls calls) {
    if (setjmp(jump_) == 0) {
      calls();
      return;
    }
    throw DataFileError(
        path_, "is damaged or cut short near byte " +
                   std::to_string(size_ - source_.bytes_in_buffer) + ": " +
                   message_);
  }

  void set_source(Bytes bytes) {
    source_.next_input_byte = bytes.data();
    source_.bytes_in_buffer = bytes.size();
    source_.init_source = [](j_decompress_ptr) {};
    source_.term_source = [](j_decompress_ptr) {};
    source_.resync_to_restart = ::jpeg_resync_to_restart;
    // All bytes were given at the beginning.
    source_.fill_input_buffer = [](j_decompress_ptr info) -> boolean {
      fail_at_end(info);
      return FALSE;
    };
    source_.skip_input_data = [](j_decompress_ptr info, long count) {
      if (count <= 0) return;
      auto* source = info->src;
      if (static_cast<size_t>(count) > source->bytes_in_buffer) {
        fail_at_end(info);
      }
      source->next_input_byte += count;
      source->bytes_in_buffer -= static_cast<size_t>(count);
    };
    info_.src = &source_;
  }

  [[noreturn]] static void fail_at_end(j_decompress_ptr info) {
    auto* self = static_cast<JpegDecoder*>(info->client_data);
    info->src->bytes_in_buffer = 0;
    std::snprintf(self->message_, sizeof self->message_,
                  "the file ends before the image does");
    std::longjmp(self->jump_, 1);
  }

  void choose_colours() {
    switch (info_.jpeg_color_space) {
      case JCS_GRAYSCALE:
        info_.out_color_space = JCS_GRAYSCALE;
        return;
      case JCS_RGB:
      case JCS_YCbCr:
        info_.out_color_space = JCS_RGB;
        return;
      case JCS_CMYK:
      case JCS_YCCK:
        info_.out_color_space = JCS_CMYK;
        return;
      default:
        throw DataFileError(
            path_, "has " + std::to_string(info_.num_components) +
                       " channels of an unknown kind; gray, RGB, YCbCr, CMYK "
                       "and YCCK are allowed");
    }
  }

  // Converts CMYK to RGB, in place. As Pillow, it takes all such files for ones
  // of Adobe's programs, which store how much ink is absent.
  static void convert_cmyk(uint8_t* pixels, size_t width) {
    for (size_t x = 0; x < width; ++x) {
      const unsigned light = pixels[4 * x + 3];
      for (size_t channel = 0; channel < 3; ++channel) {
        pixels[3 * x + channel] =
            static_cast<uint8_t>((pixels[4 * x + channel] * light + 127) / 255);
      }
    }
  }

  const std::string& path_;
  const size_t size_;
  jpeg_decompress_struct info_{};
  jpeg_error_mgr errors_{};
  jpeg_source_mgr source_{};
  jpeg_progress_mgr progress_{};
  std::jmp_buf jump_{};
  char message_[JMSG_LENGTH_MAX]{};
};

}  // namespace

void decode_jpeg(const std::string& path, Bytes bytes, uint64_t most_pixels,
                 const ImagePlanes& planes) {
  JpegDecoder(path, bytes).decode(most_pixels, planes);
}

}  // namespace lockstep::internal
