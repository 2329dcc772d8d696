#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/sharded/tensor_files.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"

namespace lockstep::internal {

// Reads tensors from TensorFiles, or parts of them, whichever way they are
// divided there, into existing tensors: first everything is
// verified, then everything is read. So a damaged file changes nothing, and
// reading takes little memory of its own (16 MiB for each thread).
class TensorReader {
 public:
  // `files` must outlive this object.
  explicit TensorReader(const TensorFiles& files) : files_(files) {}

  // Adds a tensor to be read into. A dtype that differs is converted. Throws
  // std::invalid_argument if there is no tensor of that name, or if it has
  // another shape.
  void add(const TensorShard& target);

  // Adds a tensor that is verified and not read.
  void add_to_verify(const std::string& name);

  // Reads what read() will read, and compares checksums, if there are any and
  // `checksums` is set; bools are looked at in any case. Throws SnapshotError
  // that names file and tensor.
  void verify(bool checksums) const;

  // Reads. Throws SnapshotError and std::system_error; targets have then been
  // read in part.
  void read() const;

 private:
  // Bytes that are read at once: into the target's memory, or, if `to` is null,
  // into a buffer, from which `target` is copied. In the buffer elements have
  // these strides.
  struct Task {
    const TensorFiles::Part* part;
    c10::ScalarType dtype;
    uint64_t offset;  // in the file
    uint64_t bytes;
    void* to;
    at::Tensor target;
    Sizes strides;
  };
  void add_region(const TensorFiles::Part& part, c10::ScalarType dtype,
                  const Box& region, const at::Tensor& target);
  void add_bytes(const TensorFiles::Part& part, c10::ScalarType dtype,
                 uint64_t offset, uint64_t bytes, void* to);
  void add_blocks(const TensorFiles::Part& part, c10::ScalarType dtype,
                  uint64_t offset, uint64_t bytes);
  void run(const Task& task) const;

  const TensorFiles& files_;
  std::vector<Task> tasks_;
  // The blocks that are needed, and the tensors to which they belong.
  struct Block {
    const TensorFiles::Part* part;
    uint64_t number;
    const std::string* name;
    c10::ScalarType dtype;
    auto key() const { return std::pair(part, number); }
    bool operator<(const Block& other) const { return key() < other.key(); }
  };
  std::set<Block> blocks_;
  const std::string* name_ = nullptr;  // of the tensor that is being added
};

// Reads one whole tensor into memory of its own.
at::Tensor read_tensor(const TensorFiles& files, const std::string& name,
                       bool checksums = true);

// Returns the tensor without memory (device "meta"), to compare shape and
// dtype.
at::Tensor without_memory(const TensorFiles::Tensor& tensor);

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
