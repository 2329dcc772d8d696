#include "lockstep/parallel/ddp/replica_check.h"

#include <ATen/ATen.h>

#include <string_view>

#include "lockstep/comm/collectives.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal {

std::string replica_difference(const std::vector<NamedParameter>& tensors,
                               const ProcessGroupPtr& group) {
  at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(tensors.size());
  auto mine = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const auto data = tensors[i].tensor.cpu().contiguous();
    Digest digest;
    digest.add(std::string_view(static_cast<const char*>(data.const_data_ptr()),
                                data.nbytes()));
    mine.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(digest.value());
  }
  mine = mine.to(group->control_device());
  auto all = at::empty({group->size(), count}, mine.options());
  all_gather_into_tensor(all, mine, {.group = group});
  all = all.cpu();
  const auto seen = all.accessor<int64_t, 2>();
  for (int rank = 1; rank < group->size(); ++rank) {
    for (int64_t i = 0; i < count; ++i) {
      if (seen[rank][i] == seen[0][i]) continue;
      return c10::str(tensors[i].name, " of rank ", group->global_rank(rank),
                      " differs from that of rank ", group->global_rank(0));
    }
  }
  return {};
}

}  // namespace lockstep::internal
