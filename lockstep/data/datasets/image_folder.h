#pragma once

#include <torch/data/example.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

namespace internal {
class ClassFolders;
}

struct ImageFolderOptions {
  // Files with these endings are the images, in upper or lower case; all others
  // are left out. Empty means .jpg, .jpeg and .png, and files that torchvision
  // would take and this class cannot decode (.ppm, .bmp, .pgm, .tif, .tiff,
  // .webp) are an error.
  std::vector<std::string> extensions{};

  // Whether a class may have no image.
  bool allow_empty{false};

  // An image that claims more pixels than this is refused before memory is
  // allocated. Pillow refuses at the same number.
  uint64_t max_pixels{178'956'970};
};

// Images in one folder for each class, root/cat/1.jpg, root/dog/a/2.png: the
// samples, their order and their classes are those of
// torchvision.datasets.ImageFolder. Classes are the names of the folders in
// `root`, sorted by their bytes.
//
// A sample is data uint8 [3, H, W] (red, green, blue) and target int64 [], the
// class. Images differ in size, so give them one size before the loader stacks
// them (Resize, CenterCrop, RandomResizedCrop).
//
// Formats: JPEG and PNG, by content and not by name. Pixels are those of
// Pillow's `Image.open(path).convert("RGB")`: gray becomes three equal
// channels, alpha is dropped, CMYK is converted; EXIF's orientation and colour
// profiles are ignored. 16-bit channels keep their high byte (so does Pillow
// with colour, but of 16-bit gray it makes 255 of every value above 255). A
// build of Lockstep without libjpeg or libpng refuses files of that format with
// the name of the library.
//
// The constructor lists the folders and reads no image; it keeps about 50 bytes
// for each. get() reads and decodes in the calling thread: use workers. Copies
// share the list. Several threads may call get().
class ImageFolder {
 public:
  // Throws std::system_error if a folder cannot be read; DataFileError if there
  // is no class, a class has no image, or a file has a format that cannot be
  // decoded; std::invalid_argument if an extension is not lower case with its
  // dot.
  explicit ImageFolder(const std::string& root,
                       const ImageFolderOptions& options = {});

  // Throws std::system_error or DataFileError, with the path, if the file
  // cannot be opened, is damaged or cut short, or is not an image.
  torch::data::Example<> get(size_t index) const;

  size_t size() const;

  // The names of the classes; a target is a place in this list.
  const std::vector<std::string>& classes() const;

  // The file of a sample, and its class without decoding it.
  std::string path(size_t index) const;
  int64_t target(size_t index) const;

 private:
  std::shared_ptr<const internal::ClassFolders> files_;
  uint64_t max_pixels_;
};

}  // namespace lockstep
