#include "lockstep/parallel/tensor/verify_replicated.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/current_call.h"
#include "lockstep/base/digest.h"
#include "lockstep/comm/data_movement.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/tensor/tensor_part.h"

namespace lockstep {
namespace {

int64_t digest_of(const at::Tensor& tensor) {
  const auto data = tensor.detach().cpu().contiguous();
  internal::Digest digest;
  digest.add(std::string_view(static_cast<const char*>(data.const_data_ptr()),
                              data.nbytes()));
  return static_cast<int64_t>(digest.value());
}

}  // namespace

void verify_replicated(const torch::nn::Module& module,
                       const ProcessGroupPtr& given) {
  auto group = internal::tensor_group(given);
  if (!group) return;
  const internal::UserFunction function("verify_replicated()");
  at::NoGradGuard no_grad;
  std::vector<std::string> names{"the state of the default generator"};
  std::vector<int64_t> digests;
  {
    auto generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard lock(generator.mutex());
    digests.push_back(digest_of(generator.get_state()));
  }
  auto add = [&](const auto& named) {
    for (const auto& item : named) {
      if (internal::is_divided_over(item.value(), *group)) continue;
      names.push_back("'" + item.key() + "'");
      digests.push_back(digest_of(item.value()));
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());

  auto mine = at::tensor(digests, at::kLong).to(group->control_device());
  auto all = at::empty({group->size(), mine.numel()}, mine.options());
  all_gather_into_tensor(all, mine, {.group = group});
  all = all.cpu();
  const auto seen = all.accessor<int64_t, 2>();
  for (int rank = 1; rank < group->size(); ++rank) {
    for (size_t i = 0; i < names.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      if (seen[rank][index] == seen[0][index]) continue;
      throw std::runtime_error(c10::str(
          "verify_replicated: ", names[i], " of rank ",
          group->global_rank(rank), " differs from that of rank ",
          group->global_rank(0),
          ", but the ranks of a tensor group must have the same; give them the "
          "same torch::manual_seed() before the model, and the same snapshot"));
    }
  }
}

}  // namespace lockstep
