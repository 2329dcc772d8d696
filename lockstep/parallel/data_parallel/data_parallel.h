#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/span.h"
#include "lockstep/parallel/data_parallel/replica_threads.h"
#include "lockstep/parallel/data_parallel/replicas.h"
#include "lockstep/parallel/data_parallel/scatter_gather.h"

namespace lockstep {

// After torch.nn.DataParallel (PyTorch documentation).
struct DataParallelOptions {
  // Where the replicas compute, the first where the module lies. A device may
  // stand there several times: {at::kCPU, at::kCPU} are two replicas on the
  // CPU. Empty: every accelerator (GPU) that LibTorch sees; with none, plain
  // forwards wherever the module is.
  std::vector<at::Device> device_ids{};
  // Where results are joined; none: the first of device_ids.
  std::optional<at::Device> output_device{};
  // Of the batch: along which tensors are divided and results joined.
  int64_t dim{0};
  // Threads within the operations of each CPU replica's forward; 0: the
  // caller's at::get_num_threads() divided by the CPU replicas, at least 1.
  int64_t intra_op_threads{0};
};

namespace detail {

// What of DataParallel does not depend on the module's type. One device or none
// has neither replicas nor threads.
class DataParallelState {
 public:
  DataParallelState(const torch::nn::Module& module,
                    std::vector<at::Device> devices, int64_t intra_op_threads);

  const std::vector<at::Device>& devices() const { return devices_; }
  Replicas& replicas() { return *replicas_; }
  ReplicaThreads& threads() { return *threads_; }

  std::mutex in_use;  // the function form's

 private:
  std::vector<at::Device> devices_;
  std::unique_ptr<Replicas> replicas_;
  std::unique_ptr<ReplicaThreads> threads_;
};

// device_ids, or what stands for an empty one, each with its index. Throws
// std::invalid_argument for a number of threads below 0.
std::vector<at::Device> data_parallel_devices(
    const DataParallelOptions& options);

// The state that the function form keeps for this module and these devices.
std::shared_ptr<DataParallelState> kept_data_parallel_state(
    const std::shared_ptr<torch::nn::Module>& module,
    const DataParallelOptions& options);

template <typename Impl>
std::shared_ptr<Impl> module_pointer(const std::shared_ptr<Impl>& module) {
  return module;
}
template <typename Holder>
auto module_pointer(const Holder& module) {
  return module.ptr();
}

template <typename Impl, typename... Args>
auto data_parallel_forward(DataParallelState& state, Impl& module,
                           std::optional<at::Device> output_device, int64_t dim,
                           const std::tuple<Args...>& arguments) {
  using Arguments = std::tuple<Args...>;
  using Result =
      std::decay_t<decltype(module.forward(std::declval<Args&>()...))>;
  static_assert(!std::is_void_v<Result>,
                "DataParallel needs a forward that returns something");
  const auto call = [](Impl& replica, Arguments& part) -> Result {
    return std::apply(
        [&](auto&... part_of) { return replica.forward(part_of...); }, part);
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
  results.reserve(count);
  for (auto& output : outputs) results.push_back(std::move(*output));
  return DataParallelValue<Result>::gather(std::move(results), target);
}

}  // namespace detail

// Data-parallel training of one module in one process: each forward divides its
// arguments over the devices, runs a replica of the module on each part in a
// thread of its own, and joins the results. Backward is that of autograd, in
// the thread that calls it on CPUs; the module's gradients are the sums over
// the replicas. PyTorch recommends DistributedDataParallel instead, a process
// for each device.
//
// `Module` is a module holder, a std::shared_ptr of a module, or a Sequential.
// The module is shared, not copied, and is itself the first device's replica:
// what its forward does to its buffers (running statistics) stays, what the
// other replicas do to theirs is lost, as in Python. The others are made once
// and follow the module: see Replicas, replicas.h. With one device the
// constructor moves the module there and forward is the module's.
//
// Arguments: tensors are divided along `dim`, also in tuples, pairs, vectors,
// arrays, maps and optionals; others are copied to all replicas. A batch with
// fewer rows than devices uses as many replicas as it makes parts. Results are
// joined likewise; scalars become a vector of the replicas'. See
// DataParallelValue, scatter_gather.h, for types of your own.
//
// A forward must not write to parameters: CPU replicas share them. Random
// numbers of CPU replicas (dropout) come from one generator in the order in
// which the threads ask.
//
// Throws std::invalid_argument: a module that cannot be cloned (constructor,
// with several devices), or is not on the first device; tensors that make
// different numbers of parts; results that do not match. What a replica's
// forward throws comes as ReplicaThreads says, which names replica and device.
//
// Use from one thread. Blocking: forward returns when every replica's has.
template <typename Module>
class DataParallel {
 public:
  explicit DataParallel(const Module& module,
                        const DataParallelOptions& options = {})
      : module_(detail::module_pointer(module)),
        output_device_(options.output_device),
        dim_(options.dim) {
    auto devices = detail::data_parallel_devices(options);
    if (devices.size() == 1) module_->to(devices.front());
    state_ = std::make_unique<detail::DataParallelState>(
        *module_, std::move(devices), options.intra_op_threads);
  }

  // Takes what the module's forward does, as values; returns what it does.
  template <typename... Args>
  auto forward(Args&&... args) {
    return detail::data_parallel_forward(
        *state_, *module_, output_device_, dim_,
        std::tuple<std::decay_t<Args>...>(std::forward<Args>(args)...));
  }
  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // The wrapped module.
  auto* operator->() const { return module_.get(); }
  const auto& module() const { return module_; }

  // Where forward computes; empty: wherever the module is.
  const std::vector<at::Device>& device_ids() const {
    return state_->devices();
  }

 private:
  decltype(detail::module_pointer(std::declval<const Module&>())) module_;
  std::optional<at::Device> output_device_;
  int64_t dim_;
  std::unique_ptr<detail::DataParallelState> state_;
};

// The same as a function: evaluates the module once over the devices, after
// torch.nn.parallel.data_parallel. `inputs` is the argument of forward, or a
// tuple of several.
//
// Replicas and threads of a module are kept from call to call with the same
// device_ids and intra_op_threads; those of a module that is gone are dropped
// in the next call for any. Nothing is moved to the first device: the module
// must be there. Any thread; calls with the same module wait for each other.
template <typename Module, typename... Inputs>
auto data_parallel(const Module& module, const std::tuple<Inputs...>& inputs,
                   const DataParallelOptions& options = {}) {
  const auto pointer = detail::module_pointer(module);
  const auto state = detail::kept_data_parallel_state(pointer, options);
  std::lock_guard lock(state->in_use);
  return detail::data_parallel_forward(*state, *pointer, options.output_device,
                                       options.dim, inputs);
}
template <typename Module, typename Input>
auto data_parallel(const Module& module, const Input& input,
                   const DataParallelOptions& options = {}) {
  return data_parallel(module, std::tuple<Input>(input), options);
}

}  // namespace lockstep
