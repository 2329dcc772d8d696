#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

namespace internal {
class IdxFile;
}

// Two IDX files, the format of MNIST ("The IDX file format" on the page of the
// MNIST database, yann.lecun.com/exdb/mnist), plain or compressed with gzip
// (the first two bytes tell, not the name): row i of `data` with row i of
// `target`. A plain data file is mapped, not read; a compressed one is
// decompressed into memory by the constructor. Targets are always read into
// memory.
//
// A sample is data with the file's sizes without the first, in the file's type
// (uint8, int8, int16, int32, float32, float64), and target: for a file with
// one dimension a scalar, int64 if the file has integers.
//
// Copies share files and memory. Several threads may call get() and
// get_batch().
class IdxDataset {
 public:
  // Throws std::system_error if a file cannot be opened, DataFileError if it is
  // not an IDX file, if it is damaged or cut short, or if the two files differ
  // in their number of rows.
  IdxDataset(const std::string& data, const std::string& target);

  torch::data::Example<> get(size_t index) const;

  // Returns a batch [B, ...].
  torch::data::Example<> get_batch(c10::ArrayRef<size_t> indices) const;

  size_t size() const;

  // The dtype of samples, and their sizes.
  at::ScalarType dtype() const;
  std::vector<int64_t> sizes() const;

  // All targets: [N, ...].
  const at::Tensor& target() const { return target_; }

 private:
  std::shared_ptr<const internal::IdxFile> data_;
  at::Tensor target_;
};

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
