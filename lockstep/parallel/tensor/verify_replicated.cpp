#include "lockstep/parallel/tensor/verify_replicated.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/checkpoint/generators.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/ddp/replica_check.h"
#include "lockstep/parallel/tensor/tensor_part.h"
#include "lockstep/trace/current_call.h"

namespace lockstep {
void verify_replicated(const torch::nn::Module& module,
                       const ProcessGroupPtr& given) {
  auto group = internal::tensor_group(given);
  if (!group) return;
  const internal::UserFunction function("verify_replicated()");
  std::vector<internal::NamedParameter> tensors{
      {"the state of the default generator",
       internal::generator_state(&module)}};
  auto add = [&](const auto& named) {
    for (const auto& item : named) {
      if (internal::is_divided_over(item.value(), *group)) continue;
      tensors.push_back({"'" + item.key() + "'", item.value()});
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  const auto difference = internal::replica_difference(tensors, group);
  if (difference.empty()) return;
  throw std::runtime_error(
      "verify_replicated: " + difference +
      ", but the ranks of a tensor group must have the same; give them the "
      "same torch::manual_seed() before the model, and the same snapshot");
}

}  // namespace lockstep
