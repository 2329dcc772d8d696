#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/current_call.h"

namespace lockstep {

// An operation's tensors in the form in which every backend takes them:
// contiguous, flat, of a dtype that it knows, and apart from autograd, which
// neither stops nor records what is done to them. Where it can be, that is the
// user's own memory. write_back() gives the user the results that are not.
// Internal to comm.
class Buffers {
 public:
  enum class Use { read, write };

  // To be moved only. Complex as pairs of reals (as Python), other dtypes that
  // backends lack as bytes, flattened.
  at::Tensor move(const at::Tensor& tensor, Use use);
  // To be reduced: complex as pairs of reals, small and unsigned integers in a
  // wider type. Read and written.
  at::Tensor reduce(const at::Tensor& tensor);
  // In the same form, but only read.
  at::Tensor reduce_input(const at::Tensor& tensor);
  // A copy, coalesced, half types as float; read and written.
  at::Tensor sparse(const at::Tensor& tensor);
  // `tensor` becomes `flat`, a part of a larger buffer in the form of move()
  // or reduce(), when all is over.
  void write_from(const at::Tensor& flat, const at::Tensor& tensor);

  // The shape of a tensor that was modified in place since it was added, or
  // nothing. Views are not watched: they share one counter with all views of
  // their base, which may well be modified elsewhere.
  std::optional<std::string> modified() const;
  void write_back();
  std::vector<at::Tensor> results() const;
  uint64_t bytes() const;
  // Elements of the user's tensors that go in and come out, and the dtype of
  // the first (nullptr where there is none): for the flight record.
  struct Extent {
    const char* dtype = nullptr;
    uint64_t in = 0;
    uint64_t out = 0;
  };
  Extent extent() const;
  // The dtypes of the user's tensors, in the order in which they were added.
  std::vector<ElementType> types() const;
  // Of the first tensor; nothing where there is none.
  std::optional<c10::Device> device() const;

 private:
  struct Entry {
    at::Tensor tensor;  // the user's
    at::Tensor result;  // of its dtype, its own memory or to be copied
    bool read;
    bool written;
    int64_t version;  // -1: not watched
    uint8_t units;    // of ElementType
  };
  Entry& add(const at::Tensor& tensor, bool read, bool written);
  // `row` is what the backend gets of it.
  static void count_units(Entry& entry, const at::Tensor& row);
  std::vector<Entry> entries_;
  // What `result` is made from when a wider type was reduced.
  struct Narrowed {
    size_t entry;
    at::Tensor wide;
  };
  std::vector<Narrowed> narrowed_;
};

}  // namespace lockstep
