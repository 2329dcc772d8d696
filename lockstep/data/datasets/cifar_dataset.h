#pragma once

#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include <cstddef>
#include <memory>
#include <string>

namespace lockstep {

namespace internal {
class CifarFiles;
}

struct Cifar10Options {
  // Whether to read the training files, or the test file.
  bool train{true};
};

// CIFAR-10 in its binary version (the page "The CIFAR-10 dataset",
// www.cs.toronto.edu/~kriz/cifar.html): data_batch_1.bin to data_batch_5.bin
// and test_batch.bin, in the folder `root` or in root/cifar-10-batches-bin.
// (The Python version of the dataset, which torchvision downloads, is pickles
// and is not read.) Nothing is downloaded.
//
// A sample is data uint8 [3, 32, 32] (red, green, blue) and target int64 [],
// the class from 0 to 9. The files are mapped, not read into memory. Copies
// share them. Several threads may call get() and get_batch().
class Cifar10Dataset {
 public:
  // Throws std::invalid_argument if a file does not exist, std::system_error if
  // it cannot be opened, DataFileError if it is not a whole number of records.
  explicit Cifar10Dataset(const std::string& root, Cifar10Options options = {});

  // Both throw DataFileError with the place in the file if a label is not a
  // class. A batch is [B, 3, 32, 32].
  torch::data::Example<> get(size_t index) const;
  torch::data::Example<> get_batch(c10::ArrayRef<size_t> indices) const;

  size_t size() const;

 private:
  std::shared_ptr<const internal::CifarFiles> files_;
};

struct Cifar100Options {
  // Whether to read the training file, or the test file.
  bool train{true};

  // Whether the target is the coarse label (20 classes), or the fine one (100).
  bool coarse{false};
};

// CIFAR-100 in its binary version: train.bin and test.bin, in the folder `root`
// or in root/cifar-100-binary. In everything else as Cifar10Dataset; the target
// is from 0 to 99, or from 0 to 19 if `coarse` is set.
class Cifar100Dataset {
 public:
  explicit Cifar100Dataset(const std::string& root,
                           Cifar100Options options = {});

  torch::data::Example<> get(size_t index) const;
  torch::data::Example<> get_batch(c10::ArrayRef<size_t> indices) const;

  size_t size() const;

 private:
  std::shared_ptr<const internal::CifarFiles> files_;
};

}  // namespace lockstep
