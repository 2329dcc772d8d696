#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/checkpoint/save.h"

namespace lockstep::internal {

// Copies of the tensors of a save, so that training may go on while the copies
// are written. The memory of the copies is kept for the next save.
class StagedCopy {
 public:
  // Lets the save write copies instead of its tensors, and gives it the
  // checksums of those that it compares. Both have their values when copy() has
  // ended. (Buffers, and tensors that are not on the CPU or have gaps in
  // memory, are copied here.) Tensors that are the same memory (tied weights,
  // also if one is a reshaped view of the other) share a copy. The save before
  // must have ended.
  void begin(Save& save);

  // Blocks until everything is copied. Several threads may call at the same
  // time, and share the work. The first that is done looks whether a tensor was
  // changed after begin(), as far as LibTorch counts changes
  // (at::Tensor::_version()): then some copies may have values from before the
  // change, and others from after it, and all calls throw std::runtime_error.
  // So a thread that changes tensors after its own call is not misunderstood.
  void copy();

  // Lets go of the tensors, and keeps the memory of the copies. No thread may
  // be in copy().
  void end();

 private:
  struct Source {
    std::string name;
    at::Tensor from;
    at::Tensor to;        // not defined if only checksums are wanted,
    uint64_t* checksums;  // which come here
    int64_t version;
  };
  // A range of a tensor's bytes.
  struct Piece {
    size_t source;
    size_t begin;
    size_t bytes;
  };

  void reserve(size_t bytes);
  void begin_checksums(const TensorToCompare& entry);
  void copy(const Piece& piece) const;
  void begin_copy(const TensorToWrite& entry, const at::Tensor& from,
                  const at::Tensor& to);
  size_t find_changed() const;

  at::Tensor memory_;
  std::vector<Source> sources_;
  std::vector<Piece> pieces_;
  std::atomic<size_t> next_{0};
  std::atomic<size_t> done_{0};
  // Index of the source that was changed, or one of these two.
  static constexpr size_t kNotLooked = SIZE_MAX;
  static constexpr size_t kNone = SIZE_MAX - 1;
  std::atomic<size_t> changed_{kNotLooked};
};

}  // namespace lockstep::internal
