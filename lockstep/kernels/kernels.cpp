#include "lockstep/kernels/kernels.h"

#include <hwy/highway.h>

#include <stdexcept>

namespace lockstep::internal::kernels {

std::vector<std::string> supported_targets() {
  std::vector<std::string> names;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    names.emplace_back(hwy::TargetName(target));
  }
  return names;
}

ForcedTarget::ForcedTarget(const std::string& name) {
  std::string supported;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (name == hwy::TargetName(target)) {
      hwy::SetSupportedTargetsForTest(target);
      hwy::GetChosenTarget().Update(target);
      return;
    }
    supported +=
        (supported.empty() ? "" : ", ") + std::string(hwy::TargetName(target));
  }
  throw std::invalid_argument("cannot force the target \"" + name +
                              "\": this machine runs " + supported);
}

ForcedTarget::~ForcedTarget() {
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace lockstep::internal::kernels
