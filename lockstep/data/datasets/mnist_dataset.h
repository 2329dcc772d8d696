#pragma once

#include <string>

#include "lockstep/data/datasets/idx_dataset.h"

namespace lockstep {

struct MnistOptions {
  // Whether to read the training files (train-...), or the test files
  // (t10k-...).
  bool train{true};
};

// MNIST, and datasets in its form (Fashion-MNIST, KMNIST), from the files
//
//   train-images-idx3-ubyte, train-labels-idx1-ubyte,
//   t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte
//
// in the folder `root` or in root/MNIST/raw (where torchvision.datasets.MNIST
// puts them), plain or with the ending ".gz". Nothing is downloaded.
//
// A sample is data uint8 [1, H, W] (28 x 28), 0 for the background, and target
// int64 []. See IdxDataset for copies, threads and memory.
class MnistDataset {
 public:
  // Throws std::invalid_argument if the files do not exist, otherwise what
  // IdxDataset throws, and DataFileError if they do not hold uint8 images and
  // uint8 labels.
  explicit MnistDataset(const std::string& root, MnistOptions options = {});

  torch::data::Example<> get(size_t index) const;

  // Returns a batch [B, 1, H, W].
  torch::data::Example<> get_batch(c10::ArrayRef<size_t> indices) const;

  size_t size() const { return files_.size(); }

  // All labels: int64 [N].
  const at::Tensor& target() const { return files_.target(); }

 private:
  IdxDataset files_;
};

}  // namespace lockstep
