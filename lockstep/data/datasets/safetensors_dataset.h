#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/data/example.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

namespace internal {
struct SafetensorsRows;
}

struct SafetensorsOptions {
  // The names of the tensors whose rows are data and target of the samples.
  // Without a name for the target, targets are empty tensors.
  std::string data{"data"};
  std::optional<std::string> target{"target"};
};

// Samples in tensors of a safetensors file
// (https://huggingface.co/docs/safetensors): sample i is row i of the tensor
// "data" with row i of the tensor "target", in their dtypes. What else the file
// holds is ignored. Such a file is written by `save_tensors(path, tensors)`, or
// in Python by safetensors.torch.save_file().
//
// Several files count as one, in the given order; their tensors must have the
// same dtypes, and the same shapes except for the number of rows.
//
// The files are mapped: only what is used is read from the disk, and a batch is
// copied from the mapping in one pass. Copies share the mapping. Several
// threads may call get() and get_batch().
class SafetensorsDataset {
 public:
  // Throws std::system_error if a file cannot be opened; DataFileError if it is
  // not a safetensors file, if it is damaged or cut short, if data and target
  // differ in their number of rows, or if the files do not fit each other;
  // std::invalid_argument if there is no file, or no tensor with such a name.
  explicit SafetensorsDataset(const std::string& path,
                              const SafetensorsOptions& options = {});
  explicit SafetensorsDataset(const std::vector<std::string>& paths,
                              const SafetensorsOptions& options = {});

  // Both throw DataFileError for a bool that is neither 0 nor 1.
  torch::data::Example<> get(size_t index) const;

  // Returns a batch [B, ...].
  torch::data::Example<> get_batch(c10::ArrayRef<size_t> indices) const;

  size_t size() const;

 private:
  std::shared_ptr<const internal::SafetensorsRows> rows_;
};

}  // namespace lockstep
