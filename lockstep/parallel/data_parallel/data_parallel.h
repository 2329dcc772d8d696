#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/parallel/data_parallel/replica_threads.h"
#include "lockstep/parallel/data_parallel/replicas.h"
#include "lockstep/parallel/data_parallel/scatter_gather.h"
#include "lockstep/parallel/module/wrapped_module.h"
#include "lockstep/trace/span.h"

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

namespace internal {

// The part of DataParallel that does not depend on the module's type. With less
// than two devices there are neither replicas nor threads.
class DataParallelState {
 public:
  DataParallelState(const torch::nn::Module& module,
                    std::vector<at::Device> devices, int64_t intra_op_threads);

  const std::vector<at::Device>& devices() const { return devices_; }
  Replicas& replicas() { return *replicas_; }
  ReplicaThreads& threads() { return *threads_; }

 private:
  std::vector<at::Device> devices_;
  std::unique_ptr<Replicas> replicas_;
  std::unique_ptr<ReplicaThreads> threads_;
};

// Returns device_ids, or the default if that is empty, each with its index.
// Throws std::invalid_argument for a number of threads below 0.
std::vector<at::Device> data_parallel_devices(
    const DataParallelOptions& options);

// `forward(module, arguments...)` returns module.forward(arguments...).
template <typename Impl, typename Forward, typename... Args>
auto data_parallel_forward(DataParallelState& state, Impl& module,
                           const Forward& forward,
                           std::optional<at::Device> output_device, int64_t dim,
                           const std::tuple<Args...>& arguments) {
  using Arguments = std::tuple<Args...>;
  using Result =
      std::decay_t<decltype(forward(module, std::declval<Args&>()...))>;
  static_assert(!std::is_void_v<Result>,
                "DataParallel needs a forward that returns something");
  static_assert(
      requires(const Args&... args) { forward(module, args...); },
      "DataParallel gives each replica a part of the arguments, so forward "
      "cannot write into them: it must take them by value or const reference, "
      "and return what it computes");
  const auto call = [&](Impl& replica, Arguments& part) -> Result {
    return std::apply(
        [&](auto&... part_of) -> Result {
          return forward(replica, part_of...);
        },
        part);
  };
  Span span("data_parallel", "forward");
  const auto& devices = state.devices();
  if (devices.empty()) {
    auto whole = arguments;
    return call(module, whole);
  }
  Scatter scatter(devices, dim);
  auto parts = DataParallelValue<Arguments>::scatter(arguments, scatter);
  const size_t count = sizeof...(Args) == 0 ? 1 : scatter.parts();
  GatherTarget target{output_device.value_or(devices.front()), dim};
  std::vector<Result> results;
  if (devices.size() == 1) {
    require_on_device(module, devices.front());
    auto result = call(module, parts.front());
    scatter.put_back();
    if (target.device == devices.front()) return result;
    target.scalars_to_vector = false;
    results.push_back(std::move(result));
    return DataParallelValue<Result>::gather(std::move(results), target);
  }
  auto& replicas = state.replicas();
  replicas.refresh(module, count);
  std::vector<std::optional<Result>> outputs(count);
  state.threads().run(count, [&](size_t number) {
    auto& replica =
        number == 0 ? module : dynamic_cast<Impl&>(replicas[number]);
    outputs[number].emplace(call(replica, parts[number]));
  });
  replicas.require_unwritten();
  scatter.put_back();
  results.reserve(count);
  for (auto& output : outputs) results.push_back(std::move(*output));
  return DataParallelValue<Result>::gather(std::move(results), target);
}

}  // namespace internal

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

  explicit DataParallel(
      const typename internal::ModulePointer<Module>::Given& given,
      const DataParallelOptions& options = {})
      : WrappedModule<DataParallel, Module>(given),
        output_device_(options.output_device),
        dim_(options.dim) {
    auto devices = internal::data_parallel_devices(options);
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
