// Replaces create.cpp if LibTorch has no NCCL.
#include <stdexcept>

#include "lockstep/comm/nccl/create.h"

namespace lockstep::internal::nccl {

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest&) {
  throw std::invalid_argument(missing());
}

std::string missing() {
  return "it was left out of this build of Lockstep (" LOCKSTEP_NCCL_LEFT_OUT
         "); build Lockstep against a CUDA LibTorch (cmake --preset cuda), or "
         "name a backend for CPUs, or none to choose by device";
}

}  // namespace lockstep::internal::nccl
