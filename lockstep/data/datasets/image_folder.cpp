#include "lockstep/data/datasets/image_folder.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <stdexcept>

#include "lockstep/data/files/byte_reader.h"
#include "lockstep/data/files/class_folders.h"
#include "lockstep/data/files/image_decoder.h"
#include "lockstep/data/held_dataset.h"

namespace lockstep {
namespace {

internal::ClassFolders::Options listing(const ImageFolderOptions& options) {
  for (const std::string& extension : options.extensions) {
    if (!extension.starts_with('.') ||
        std::any_of(extension.begin(), extension.end(),
                    [](char c) { return c >= 'A' && c <= 'Z'; })) {
      throw std::invalid_argument("ImageFolder: an extension is \"" +
                                  extension +
                                  "\"; give it in lower case with its dot, "
                                  "such as \".png\"");
    }
  }
  internal::ClassFolders::Options listed;
  listed.allow_empty = options.allow_empty;
  listed.extensions = options.extensions;
  if (listed.extensions.empty()) {
    listed.extensions = {".jpg", ".jpeg", ".png"};
    listed.refused_extensions = {".ppm", ".bmp",  ".pgm",
                                 ".tif", ".tiff", ".webp"};
  }
  return listed;
}

}  // namespace

ImageFolder::ImageFolder(const std::string& root,
                         const ImageFolderOptions& options)
    : files_(std::make_shared<const internal::ClassFolders>(root,
                                                            listing(options))),
      max_pixels_(options.max_pixels) {}

torch::data::Example<> ImageFolder::get(size_t index) const {
  internal::check_index(index, size(), "ImageFolder");
  const internal::MappedFile file(files_->path(index));
  at::Tensor image;
  internal::decode_image(
      file.path(), file.bytes(), max_pixels_, [&](size_t height, size_t width) {
        image = at::empty(
            {3, static_cast<int64_t>(height), static_cast<int64_t>(width)},
            at::TensorOptions(at::kByte).device(at::kCPU));
        return image.mutable_data_ptr<uint8_t>();
      });
  return {image,
          at::scalar_tensor(files_->class_of(index),
                            at::TensorOptions(at::kLong).device(at::kCPU))};
}

size_t ImageFolder::size() const { return files_->size(); }

const std::vector<std::string>& ImageFolder::classes() const {
  return files_->classes();
}

std::string ImageFolder::path(size_t index) const {
  internal::check_index(index, size(), "ImageFolder");
  return files_->path(index);
}

int64_t ImageFolder::target(size_t index) const {
  internal::check_index(index, size(), "ImageFolder");
  return files_->class_of(index);
}

}  // namespace lockstep
