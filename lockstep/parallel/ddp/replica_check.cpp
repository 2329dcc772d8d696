#include "lockstep/parallel/ddp/replica_check.h"

#include <ATen/ATen.h>

#include <string_view>

#include "lockstep/comm/agreement.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal {

std::string replica_difference(const std::vector<NamedParameter>& tensors,
                               const ProcessGroupPtr& group) {
  const at::NoGradGuard no_grad;
  Agreement agreement(group);
  for (const auto& [name, tensor] : tensors) {
    const auto data = tensor.cpu().contiguous();
    Digest digest;
    digest.add(std::string_view(static_cast<const char*>(data.const_data_ptr()),
                                data.nbytes()));
    agreement.hold(name, std::to_string(digest.value()));
  }
  const auto found = agreement.compare();
  if (!found) return {};
  return c10::str(found->name, " of rank ", found->rank,
                  " differs from that of rank ", found->first_rank);
}

}  // namespace lockstep::internal
