#include "lockstep/parallel/data_parallel/node_streams.h"

#include "lockstep/comm/accelerator.h"

namespace lockstep::internal {

at::Tensor across_devices(const std::optional<c10::Stream>& of_node,
                          const std::vector<at::Tensor>& gradients,
                          const at::Device& device,
                          const std::function<at::Tensor()>& work) {
  if (!of_node) return work();
  std::vector<c10::Stream> streams;
  const auto use = [&](const at::Device& used) {
    if (const auto stream = current_stream(used)) streams.push_back(*stream);
  };
  use(device);
  for (const auto& gradient : gradients) {
    if (!gradient.defined()) continue;
    use(gradient.device());
    keep_for_current_stream(gradient);
  }
  for (const auto& stream : streams) await_stream(stream, *of_node);
  auto result = work();
  for (const auto& stream : streams) await_stream(*of_node, stream);
  return result;
}

}  // namespace lockstep::internal
