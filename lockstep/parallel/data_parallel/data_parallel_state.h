#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/parallel/data_parallel/replica_threads.h"
#include "lockstep/parallel/data_parallel/replicas.h"
#include "lockstep/parallel/data_parallel/scatter_gather.h"
#include "lockstep/trace/span.h"

namespace lockstep::internal {

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

// Returns `device_ids`, or the default if that is empty, each with its index.
// Throws std::invalid_argument for a number of threads below 0.
std::vector<at::Device> data_parallel_devices(
    const std::vector<at::Device>& device_ids, int64_t intra_op_threads);

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

}  // namespace lockstep::internal
