#pragma once

#include <string>
#include <vector>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// A tensor of a snapshot under one name: a parameter's or buffer's own, or
// "optimizer.3.exp_avg" for the state of parameter 3.
struct ListedTensor {
  std::string name;
  at::Tensor tensor;
};

// Returns all tensors of a snapshot: the model's in its order, then the
// optimizer's by parameter.
std::vector<ListedTensor> listed_tensors(const Snapshot& snapshot);

// Returns "[2, 3]".
std::string shape_text(const at::Tensor& tensor);
// Returns Python's name: "float32".
std::string dtype_text(const at::Tensor& tensor);
// Returns "16.2 MiB", or "512 B".
std::string bytes_text(double bytes);
// Returns the table of `rows`, whose first is the header, with columns of equal
// width. Columns in `right` are aligned to the right.
std::string table_text(const std::vector<std::vector<std::string>>& rows,
                       const std::vector<size_t>& right);

// Returns the Euclidean norm of all elements, computed in float64; NaN if an
// element is NaN.
double norm_of(const at::Tensor& tensor);

// Both describe a snapshot that was read from `path`, and end with a newline.
// `with_norms`: adds each tensor's norm. docs/snapshots.md has the fields of
// the JSON.
std::string listing_table(const std::string& path, const Snapshot& snapshot,
                          bool with_norms);
std::string listing_json(const std::string& path, const Snapshot& snapshot,
                         bool with_norms);

}  // namespace lockstep::internal
