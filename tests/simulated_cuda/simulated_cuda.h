#pragma once

// A CUDA device for tests on machines without a GPU. A program that links this
// library (whole, see simulated_cuda in CMakeLists.txt) finds
// torch::cuda::is_available() true although its LibTorch knows no CUDA:
// devices, streams, events, a caching allocator, pinned memory and generators
// are here, and every operation runs LibTorch's CPU kernel. simulated_xpu is
// the same for XPU, LibTorch's second type of accelerator whose tensors a
// module's to() takes in the place of those of the CPU.
//
// The device is as hostile as CUDA permits:
//
// - An operation runs later than its call, on the thread of its stream. A seed
//   decides which streams are eager, which hesitate and which do nothing until
//   the host waits for them. So whatever is not ordered by the same stream, an
//   event or a wait runs in another order with some seed.
// - Host code that reads or writes device memory dies with SIGSEGV and a line
//   that says so. Operations on tensors of several devices are refused.
// - New memory is full of NaN (bytes 0xff), written in the order of its stream.
//   Freed memory is given to the next tensor of the same stream at once, and to
//   other streams never; record_stream() delays this until the other stream has
//   done what it was given before the tensor was freed.
// - Copies between the device and pinned memory with non_blocking run later,
//   too. Pageable memory is copied before the call returns.
// - An error inside an operation (an index out of range) is thrown by the next
//   call that waits for the device.
//
// Shapes of results are known at the call: LibTorch's meta kernel says them or,
// where it has none, a run of the CPU kernel on zeros, once for each signature.
// Operations whose result has a shape that depends on values (nonzero()), or
// that return numbers (item()), wait for their stream, as with CUDA.
//
// The simulation cannot find: errors of CUDA's kernels, of NCCL and of drivers;
// races inside a kernel; numbers that differ because a GPU adds in another
// order; missing alignment; memory that runs out; anything about speed. CUDA's
// graphs are missing, and so are those operations that only CUDA has, except
// the ones in cuda_operations.cpp and network_operations.cpp. Sparse tensors
// are computed on the CPU.
//
// All functions may be called from any thread, except in a process forked after
// the first use of a device: there, as with CUDA, any use throws c10::Error.
// The environment sets what a process starts with: SIMULATED_CUDA_DEVICES (4),
// SIMULATED_CUDA_SEED (1). CUDA_VISIBLE_DEVICES chooses some of the devices.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>

namespace lockstep::internal::simulated_cuda {

// Waits for all streams of all devices, frees all cached memory, and starts a
// new draw of delays. With the seed 0 every stream is eager. Afterwards
// getStreamFromGlobalPool() gives the first stream of the pool again, so that a
// test meets the same delays whenever it begins with the same seed. Throws the
// error of an operation that has failed since the last wait.
void restart(uint64_t seed);

// Waits for all streams of all devices. Throws as restart().
void synchronize();

struct Counters {
  int64_t operations = 0;   // that streams have run
  int64_t host_waits = 0;   // times that the host waited for a stream or event
  int64_t live_blocks = 0;  // blocks of device memory that are not freed
  int64_t live_bytes = 0;   // in these blocks
};
// Returns the counts of this process since it started, over all devices.
Counters counters();

// Runs `task` on `stream` after all that was enqueued there. An exception is
// thrown by the next wait. The task must not wait for streams; it may block.
void enqueue(const c10::Stream& stream, std::function<void()> task);

// Returns a CPU tensor over the memory of `tensor`, which must be dense and on
// a device. Only a task may read or write it; at any other time it shows what a
// GPU would not have computed yet. It does not own the memory: after `tensor`
// has been freed, the memory belongs to others, as for a kernel.
at::Tensor memory_of(const at::Tensor& tensor);

// Returns the number of a visible device among those of the machine: with
// CUDA_VISIBLE_DEVICES=2,3, cuda:0 is device 2.
int physical_index(c10::DeviceIndex device);

}  // namespace lockstep::internal::simulated_cuda
