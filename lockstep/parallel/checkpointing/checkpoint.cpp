#include "lockstep/parallel/checkpointing/checkpoint.h"

#include <torch/nn/modules/container/any.h>

#include <string>
#include <vector>

namespace lockstep {

at::Tensor checkpoint_sequential(const torch::nn::Sequential& functions,
                                 int64_t segments, at::Tensor input,
                                 const CheckpointOptions& options) {
  const auto count = static_cast<int64_t>(functions->size());
  if (segments < 1 || segments > count) {
    throw std::invalid_argument(
        "checkpoint_sequential: segments is " + std::to_string(segments) +
        "; it must be from 1 to " + std::to_string(count) +
        ", the number of modules");
  }
  const int64_t length = count / segments;
  const auto run = [](std::vector<torch::nn::AnyModule>& modules,
                      at::Tensor value) {
    for (auto& module : modules) value = module.forward(std::move(value));
    return value;
  };
  auto next = functions->begin();
  for (int64_t i = 0; i + 1 < segments; ++i) {
    std::vector<torch::nn::AnyModule> part(next, next + length);
    next += length;
    input = checkpoint(
        options,
        [part = std::move(part), run](at::Tensor value) mutable {
          return run(part, std::move(value));
        },
        input);
  }
  std::vector<torch::nn::AnyModule> last(next, functions->end());
  return run(last, std::move(input));
}

}  // namespace lockstep
