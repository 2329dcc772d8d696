#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/node.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace lockstep {

// Gradients of this many bytes and more are placed; their slots in buckets
// begin at multiples of kPlacedAlignment bytes.
inline constexpr size_t kPlacedBytes = size_t{64} << 10;
inline constexpr size_t kPlacedAlignment = 64;

// Lets backward compute large gradients where they are reduced, which spares
// their copy. Whoever computes a gradient allocates its memory first; while
// this is armed an allocation by a node of the graph that feeds a parameter's
// accumulator, of just the gradient's bytes, is given the parameter's slot.
//
// For that the process's CPU allocator (c10::SetCPUAllocator) is replaced, once
// and for good, by one that hands everything else on to the one before. Where a
// program has set one of higher priority nothing is placed.
//
// A slot can go to something else of that size in the same node: held() says
// that its memory is in use by a tensor that is not the gradient.
//
// Threads: allocations may come from any; only those of the thread that armed
// are placed. Else for one thread.
class GradientPlacement {
 public:
  struct Slot {
    size_t parameter;
    at::Tensor tensor;   // the parameter; placed while it has no gradient
    at::Tensor alias;    // contiguous or dense, of CPU memory
    at::Tensor storage;  // keeps the memory, as long as a tensor uses it
    const torch::autograd::Node* accumulator;
  };

  GradientPlacement();
  GradientPlacement(const GradientPlacement&) = delete;
  GradientPlacement& operator=(const GradientPlacement&) = delete;
  ~GradientPlacement();

  // Instead of those before. Slots that are small or not aligned are left out.
  void set_slots(const std::vector<Slot>& slots, size_t parameters);
  void arm();
  void disarm();

  bool held(size_t parameter) const;
  // Its slot is not given away any more.
  void withdraw(size_t parameter);

 private:
  friend class PlacingAllocator;
  void leave_table();
  struct Record;
  struct Table;

  std::shared_ptr<Table> table_;
  std::vector<std::shared_ptr<Record>> by_parameter_;  // null: not placed
};

}  // namespace lockstep
