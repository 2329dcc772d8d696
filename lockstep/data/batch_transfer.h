#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>

namespace lockstep::internal {

// Brings the tensors of batches into pinned memory and to a device. With CUDA,
// or another device with streams, workers copy on a stream of their own while
// the loop computes on its stream; an event per batch orders the two.
//
// Threads: begin_copy() may be called by several threads at once.
class BatchTransfer {
 public:
  using Visit = std::function<void(at::Tensor&)>;
  // Calls the function for each tensor of a batch.
  using Visitor = std::function<void(const Visit&)>;
  // Is recorded after the copies of a batch; none if nothing has to wait.
  using Copied = std::optional<c10::Event>;

  // Throws std::invalid_argument if LibTorch finds no such device. `ahead`:
  // whether other threads than the loop's copy.
  BatchTransfer(bool pin_memory, std::optional<at::Device> device, bool ahead);

  // Whether there is nothing to do.
  bool is_idle() const { return !pins_ && !device_; }

  // Pins the tensors, and starts to copy them.
  Copied begin_copy(const Visitor& for_each_tensor) const;

  // Makes the current stream of the calling thread wait for the copies. The
  // thread itself does not wait. Requires that `copied` is an event.
  void end_copy(Copied& copied, const Visitor& for_each_tensor) const;

 private:
  at::Tensor moved(const at::Tensor& tensor) const;

  bool pins_ = false;
  std::optional<at::Device> device_;
  std::optional<c10::Stream> stream_;  // on which threads copy ahead
};

}  // namespace lockstep::internal
