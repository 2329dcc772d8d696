#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/trace/current_call.h"

namespace lockstep::internal {

struct Call;

// Returns the dtype in which backends reduce `dtype`: itself, or a wider one in
// which all reductions give the same bits once they are narrowed again.
at::ScalarType reduced_as(at::ScalarType dtype);

// Whether every backend can take `dtype`, possibly as another dtype.
bool known_to_backends(at::ScalarType dtype);

// Throws what Buffers::require_apart() throws, for the tensors `written` of
// several operations.
void require_apart(const Call& call, const std::vector<at::Tensor>& written);

// Holds an operation's tensors in the form in which every backend takes them:
// contiguous, flat, of a dtype that the backend knows, and apart from autograd,
// which neither forbids nor records what is done to them. If possible that is
// the user's own memory; otherwise write_back() copies the results to the
// user's tensors. Internal to comm.
//
// This is the one place where a tensor is made ready for a backend; only a
// tensor that needs nothing of it goes another way (all_reduce_directly() in
// reductions.cpp). Call the checks of the arguments (collective_call.h) before;
// run_collective() and run_message() call require_apart() before anything is
// started.
class Buffers {
 public:
  enum class Use { read, write };

  // Holds the tensors of `call`, which must live while tensors are added and is
  // not used afterwards: it may then be moved.
  explicit Buffers(const Call& call) : call_(call) {}

  // The functions that add a tensor to be written throw at once if that is not
  // possible: before a contiguous copy is made, which may not fit into memory.

  // Adds a tensor that is only moved, and returns it flattened: complex numbers
  // as pairs of reals (as in Python), other dtypes that backends lack as bytes.
  at::Tensor move(const at::Tensor& tensor, Use use);
  // Adds a tensor that is reduced, so read and written: complex numbers as
  // pairs of reals, small and unsigned integers in a wider type.
  at::Tensor reduce(const at::Tensor& tensor);
  // Adds a tensor in the form of reduce() that is only read.
  at::Tensor reduce_input(const at::Tensor& tensor);
  // Adds a sparse tensor that is read and written. Returns a coalesced copy,
  // with half types as float.
  at::Tensor sparse(const at::Tensor& tensor);
  // Lets write_back() copy `flat` to `tensor`. `flat` is a part of a larger
  // buffer, in the form of move() or reduce().
  void write_from(const at::Tensor& flat, const at::Tensor& tensor);

  // Throws unless each dense tensor that will be written has memory, and
  // overlaps neither another one nor itself.
  void require_apart(const Call& call) const;

  // Returns dtype and shape of a tensor that was modified in place after it was
  // added, or nothing. Views are not watched: all views of a base share one
  // version counter, and other views may rightly be modified meanwhile.
  std::optional<std::string> modified() const;
  void write_back();
  std::vector<at::Tensor> results() const;
  // Returns the user's tensors that are read.
  std::vector<at::Tensor> inputs() const;
  // The dtype of the first of the user's tensors (no name if there is none),
  // how many elements of all of them go in and come out, and how many bytes the
  // dense ones have.
  struct Extent {
    ElementType type{};
    uint64_t in = 0;
    uint64_t out = 0;
    uint64_t bytes = 0;
  };
  Extent extent() const;
  // The dtypes of the user's tensors, in the order in which they were added.
  std::vector<ElementType> types() const;
  // Returns the device of the first tensor, or nothing if there is no tensor.
  std::optional<c10::Device> device() const;

 private:
  struct Entry {
    at::Tensor tensor;  // the user's
    at::Tensor result;  // the values for `tensor`; may be in its own memory
    bool read;
    bool written;
    int64_t version;  // -1 if it is not watched
    uint8_t units;    // as in ElementType
  };
  Entry& add(const at::Tensor& tensor, bool read, bool written);
  static ElementType type_of(const Entry& entry);
  // Sets `units` of `entry`, of whose tensor the backend gets `row`.
  static void count_units(Entry& entry, const at::Tensor& row);
  const Call& call_;
  std::vector<Entry> entries_;
  // A tensor of a wider type that was reduced; write_back() makes the entry's
  // `result` from it.
  struct Narrowed {
    size_t entry;
    at::Tensor wide;
  };
  std::vector<Narrowed> narrowed_;
};

}  // namespace lockstep::internal
