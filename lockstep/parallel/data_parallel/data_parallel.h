#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/parallel/data_parallel/data_parallel_state.h"
#include "lockstep/parallel/data_parallel/scatter_gather.h"
#include "lockstep/parallel/module/wrapped_module.h"

namespace lockstep {

// The arguments of torch.nn.DataParallel (PyTorch documentation), and
// intra_op_threads.
struct DataParallelOptions {
  // ---- Behaviour ----

  // The devices of the replicas; the module itself is on the first. A device
  // may be named several times: {at::kCPU, at::kCPU} makes two replicas on the
  // CPU. Empty means every accelerator (GPU) that LibTorch sees; if there is
  // none, plain forwards on the module's own device.
  std::vector<at::Device> device_ids{};

  // The device on which results are joined. None means the first of device_ids.
  std::optional<at::Device> output_device{};

  // The dimension of the batch, along which tensors are divided and results
  // joined.
  int64_t dim{0};

  // ---- Performance (not in Python) ----

  // Threads within the operations of each CPU replica's forward. Most programs
  // leave it. 0 means the caller's at::get_num_threads() divided by the number
  // of CPU replicas, at least 1.
  int64_t intra_op_threads{0};
};

// Data-parallel training of one module in one process. Each forward divides its
// arguments over the devices, runs a replica of the module on each part in a
// thread of its own, and joins the results. Autograd runs the backward; on CPUs
// it does so in the thread that calls backward(). The module's gradients are
// the sums over the replicas. PyTorch recommends DistributedDataParallel
// instead, with a process for each device.
//
// `Module`: as for DistributedDataParallel. The module is shared, not copied,
// and is itself the first device's replica: changes that its forward makes to
// its buffers (running statistics) stay, changes by the other replicas are
// lost, as in Python. The other replicas are made once and follow the module:
// see Replicas, replicas.h. With one device the constructor moves the module
// there, and forward is the module's own.
//
// Arguments are values. Tensors are divided along `dim`, also inside tuples,
// pairs, vectors and maps; anything else is copied to all replicas. A batch
// with fewer rows than devices uses only as many replicas as it has parts.
// Results are joined in the same way; scalars become a vector with one element
// for each replica. For types of your own see DataParallelValue,
// scatter_gather.h.
//
// A forward that writes an argument in place writes the caller's tensor. With
// several devices it must not write parameters (std::logic_error): CPU replicas
// share them, and other replicas have copies. CPU replicas draw random numbers
// (dropout) from one generator, in the order in which their threads ask for
// them; so checkpoint() in several of them needs preserve_rng_state = false.
//
// Throws std::invalid_argument for a module that cannot be cloned (in the
// constructor, with several devices) or is not on the first device, for tensors
// that make different numbers of parts, and for results that do not match. An
// exception from a replica's forward is rethrown as ReplicaThreads describes,
// with replica and device.
//
// Use from one thread. Blocking: forward returns when all replicas have
// returned.
template <typename Module>
class DataParallel : public WrappedModule<DataParallel<Module>, Module> {
 public:
  using WrappedModule<DataParallel, Module>::module;

  explicit DataParallel(const ModuleHandle<Module>& given,
                        const DataParallelOptions& options = {})
      : WrappedModule<DataParallel, Module>(given),
        output_device_(options.output_device),
        dim_(options.dim) {
    auto devices = internal::data_parallel_devices(options.device_ids,
                                                   options.intra_op_threads);
    if (devices.size() == 1) module()->to(devices.front());
    state_ = std::make_unique<internal::DataParallelState>(
        *module(), std::move(devices), options.intra_op_threads);
  }

  // Returns the devices of forward; empty means the module's own device.
  const std::vector<at::Device>& device_ids() const {
    return state_->devices();
  }

 private:
  friend struct internal::WrapperAccess;

  template <typename Forward, typename... Args>
  auto run(const Forward& forward, Args&&... args) {
    return internal::data_parallel_forward(
        *state_, *module(), forward, output_device_, dim_,
        std::tuple<std::decay_t<Args>...>(std::forward<Args>(args)...));
  }

  std::optional<at::Device> output_device_;
  int64_t dim_;
  std::unique_ptr<internal::DataParallelState> state_;
};

template <typename Module>
DataParallel(Module, ...) -> DataParallel<Module>;

}  // namespace lockstep
