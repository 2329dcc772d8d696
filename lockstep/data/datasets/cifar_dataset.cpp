#include "lockstep/data/datasets/cifar_dataset.h"

#include <ATen/Functions.h>

#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <vector>

#include "lockstep/data/data_file_error.h"
#include "lockstep/data/files/byte_reader.h"
#include "lockstep/data/held_dataset.h"

namespace lockstep {
namespace internal {

// Files of records: some labels of one byte, then three planes of 32 x 32.
class CifarFiles {
 public:
  struct Format {
    const char* dataset;  // for errors
    size_t labels;        // in each record
    size_t label;         // which of them is the target
    uint8_t classes;
  };

  CifarFiles(const Format& format, const std::string& root,
             const std::string& folder, const std::vector<std::string>& names)
      : format_(format) {
    for (const std::string& name : names) {
      const auto& file = *files_.emplace_back(
          std::make_unique<MappedFile>(find(root, folder, name)));
      const size_t bytes = file.bytes().size();
      if (bytes == 0 || bytes % record() != 0) {
        throw DataFileError(
            file.path(), "has " + std::to_string(bytes) +
                             " bytes, which is not a whole number of records "
                             "of " +
                             std::to_string(record()) +
                             " bytes: it was cut "
                             "short, or is not the binary version of " +
                             format_.dataset);
      }
      ends_.push_back(size() + bytes / record());
    }
  }

  size_t size() const { return ends_.empty() ? 0 : ends_.back(); }

  // Writes the image to `pixels` and returns the label.
  int64_t copy(size_t index, uint8_t* pixels) const {
    const auto [place, row] = place_in_parts(index, ends_, format_.dataset);
    const MappedFile& file = *files_[place];
    const Bytes bytes = file.bytes().subspan(row * record(), record());
    const uint8_t label = bytes[format_.label];
    if (label >= format_.classes) {
      throw DataFileError(
          file.path(),
          "is damaged: the label of record " + std::to_string(row) + " (byte " +
              std::to_string(row * record() + format_.label) + ") is " +
              std::to_string(label) + "; " + format_.dataset +
              " has the labels 0 to " + std::to_string(format_.classes - 1));
    }
    std::memcpy(pixels, bytes.data() + format_.labels, kPixels);
    return label;
  }

  torch::data::Example<> sample(size_t index) const {
    at::Tensor image =
        at::empty({3, 32, 32}, at::TensorOptions(at::kByte).device(at::kCPU));
    const int64_t label = copy(index, image.mutable_data_ptr<uint8_t>());
    return {image, at::scalar_tensor(
                       label, at::TensorOptions(at::kLong).device(at::kCPU))};
  }

  torch::data::Example<> batch(c10::ArrayRef<size_t> indices) const {
    const auto count = static_cast<int64_t>(indices.size());
    at::Tensor images = at::empty(
        {count, 3, 32, 32}, at::TensorOptions(at::kByte).device(at::kCPU));
    at::Tensor labels =
        at::empty({count}, at::TensorOptions(at::kLong).device(at::kCPU));
    auto* pixels = images.mutable_data_ptr<uint8_t>();
    auto* label = labels.mutable_data_ptr<int64_t>();
    for (size_t i = 0; i < indices.size(); ++i) {
      label[i] = copy(indices[i], pixels + i * kPixels);
    }
    return {images, labels};
  }

 private:
  static constexpr size_t kPixels = 3 * 32 * 32;

  size_t record() const { return format_.labels + kPixels; }

  std::string find(const std::string& root, const std::string& folder,
                   const std::string& name) const {
    for (const std::string& path :
         {root + "/" + name, root + "/" + folder + "/" + name}) {
      std::error_code ignored;
      if (std::filesystem::exists(path, ignored)) return path;
    }
    throw std::invalid_argument(
        std::string(format_.dataset) + ": there is no file " + name + " in \"" +
        root + "\" or \"" + root + "/" + folder +
        "\"; give the folder of the unpacked binary version");
  }

  Format format_;
  std::vector<std::unique_ptr<const MappedFile>> files_;
  std::vector<size_t> ends_;  // of each file, in records
};

}  // namespace internal

Cifar10Dataset::Cifar10Dataset(const std::string& root, Cifar10Options options)
    : files_(std::make_shared<const internal::CifarFiles>(
          internal::CifarFiles::Format{"CIFAR-10", 1, 0, 10}, root,
          "cifar-10-batches-bin",
          options.train
              ? std::vector<std::string>{"data_batch_1.bin", "data_batch_2.bin",
                                         "data_batch_3.bin", "data_batch_4.bin",
                                         "data_batch_5.bin"}
              : std::vector<std::string>{"test_batch.bin"})) {}

torch::data::Example<> Cifar10Dataset::get(size_t index) const {
  return files_->sample(index);
}
torch::data::Example<> Cifar10Dataset::get_batch(
    c10::ArrayRef<size_t> indices) const {
  return files_->batch(indices);
}
size_t Cifar10Dataset::size() const { return files_->size(); }

Cifar100Dataset::Cifar100Dataset(const std::string& root,
                                 Cifar100Options options)
    : files_(std::make_shared<const internal::CifarFiles>(
          internal::CifarFiles::Format{
              "CIFAR-100", 2, options.coarse ? size_t{0} : size_t{1},
              options.coarse ? uint8_t{20} : uint8_t{100}},
          root, "cifar-100-binary",
          std::vector<std::string>{options.train ? "train.bin" : "test.bin"})) {
}

torch::data::Example<> Cifar100Dataset::get(size_t index) const {
  return files_->sample(index);
}
torch::data::Example<> Cifar100Dataset::get_batch(
    c10::ArrayRef<size_t> indices) const {
  return files_->batch(indices);
}
size_t Cifar100Dataset::size() const { return files_->size(); }

}  // namespace lockstep
