#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep {

// The exception of the loop over a DataLoader if the dataset, or the function
// that collates, has thrown. It says at which samples; the exception itself is
// nested:
//
//   try {
//     for (auto& batch : loader) { ... }
//   } catch (const lockstep::DataLoaderError& error) {
//     // error.what(): "DataLoader: the dataset failed at sample 9, in batch 2
//     // of this loop: cannot read b.png"
//     error.rethrow_nested();  // the exception that the dataset threw
//   }
class DataLoaderError : public std::runtime_error,
                        public std::nested_exception {
 public:
  // Nests the exception that is being handled.
  DataLoaderError(const std::string& what, int64_t batch,
                  std::vector<size_t> indices)
      : std::runtime_error(what), batch_(batch), indices_(std::move(indices)) {}

  // Returns the number of the batch in its loop, from 0.
  int64_t batch() const { return batch_; }

  // Returns the index of the sample that failed. If that is not known, because
  // the dataset has no get() or collating failed, these are the indices of all
  // samples in the batch.
  const std::vector<size_t>& indices() const { return indices_; }

 private:
  int64_t batch_;
  std::vector<size_t> indices_;
};

}  // namespace lockstep
