#include "lockstep/parallel/ddp/replica_check.h"

#include <ATen/ATen.h>

#include <stdexcept>
#include <string_view>

#include "lockstep/base/digest.h"
#include "lockstep/comm/collectives.h"

namespace lockstep::internal {

void verify_equal_replicas(const std::vector<NamedParameter>& tensors,
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
      throw std::runtime_error(c10::str(
          "the replicas have drifted apart: '", tensors[i].name, "' of rank ",
          group->global_rank(rank), " differs from that of rank ",
          group->global_rank(0),
          "; something changed it on one rank only (a step that was left out "
          "there, other options of the optimizer, faulty memory): load a "
          "snapshot on all ranks"));
    }
  }
}

}  // namespace lockstep::internal
