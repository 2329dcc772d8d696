#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "lockstep/checkpoint/sharded/tensor_files.h"

namespace lockstep::internal {

// Returns these tensors as views of the files' memory mappings: nothing is read
// before it is used, and nothing is verified, except that bools are 0 or 1.
// Writing to the tensors does not change the files (the pages that are written
// to become copies). The files may be replaced or removed as snapshots are, but
// must not be overwritten or cut short while the tensors live: that would
// change them, or end the process with SIGBUS.
//
// A tensor that lies in several parts is read instead, and so is one whose
// elements are not aligned in the file.
std::vector<at::Tensor> map_tensors(const TensorFiles& files,
                                    const std::vector<std::string>& names);

}  // namespace lockstep::internal
