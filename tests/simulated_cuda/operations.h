#pragma once

// How operations reach the streams: tensors that stand for device tensors while
// a kernel runs, and the registration with LibTorch's dispatcher.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Stream.h>

#include <functional>
#include <unordered_map>
#include <vector>

namespace lockstep::internal::simulated_cuda {

// Makes CPU tensors over the contents of device tensors. What is the same
// tensor or shares a storage does so here, too, as kernels look at this. The
// result does not own the memory: a tensor that is freed before its operation
// has run loses it, as on a GPU.
class MemoryViews {
 public:
  at::Tensor of(const at::Tensor& tensor);

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;
};

// Returns `value` with each tensor in it replaced.
c10::IValue with_tensors(
    const c10::IValue& value,
    const std::function<at::Tensor(const at::Tensor&)>& replace);

// Runs an operation by the kernel of the CPU, as a task of the current stream.
// Takes the arguments from `stack` and leaves the results there.
void run_on_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

// Runs `kernel`, which uses CPU tensors, as a task of `stream`.
void enqueue_kernel(const c10::Stream& stream, std::function<void()> kernel);

}  // namespace lockstep::internal::simulated_cuda
