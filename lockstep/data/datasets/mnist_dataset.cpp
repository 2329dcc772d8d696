#include "lockstep/data/datasets/mnist_dataset.h"

#include <filesystem>
#include <stdexcept>

#include "lockstep/data/data_file_error.h"
#include "lockstep/data/files/idx_file.h"

namespace lockstep {
namespace {

std::string find_mnist_file(const std::string& root, const std::string& name) {
  for (const char* folder : {"/", "/MNIST/raw/"}) {
    for (const char* ending : {"", ".gz"}) {
      std::string path = root + folder + name + ending;
      std::error_code ignored;
      if (std::filesystem::exists(path, ignored)) return path;
    }
  }
  throw std::invalid_argument(
      "MnistDataset: there is no file " + name + " or " + name + ".gz in \"" +
      root + "\" or \"" + root + "/MNIST/raw\"; give the folder that holds it");
}

IdxDataset open_mnist(const std::string& root, const MnistOptions& options) {
  const std::string part = options.train ? "train" : "t10k";
  const std::string images = find_mnist_file(root, part + "-images-idx3-ubyte");
  const std::string labels = find_mnist_file(root, part + "-labels-idx1-ubyte");
  IdxDataset files(images, labels);
  if (files.dtype() != at::kByte || files.sizes().size() != 2) {
    throw DataFileError(images,
                        "does not hold images: MNIST has three "
                        "dimensions of uint8");
  }
  if (files.target().scalar_type() != at::kLong || files.target().dim() != 1) {
    throw DataFileError(labels,
                        "does not hold labels: MNIST has one dimension "
                        "of uint8");
  }
  return files;
}

}  // namespace

MnistDataset::MnistDataset(const std::string& root, MnistOptions options)
    : files_(open_mnist(root, options)) {}

torch::data::Example<> MnistDataset::get(size_t index) const {
  auto sample = files_.get(index);
  return {sample.data.unsqueeze(0), sample.target};
}

torch::data::Example<> MnistDataset::get_batch(
    c10::ArrayRef<size_t> indices) const {
  auto batch = files_.get_batch(indices);
  return {batch.data.unsqueeze(1), batch.target};
}

}  // namespace lockstep
