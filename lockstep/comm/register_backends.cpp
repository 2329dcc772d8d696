#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/fake/create.h"
#include "lockstep/comm/gloo/create.h"
#include "lockstep/comm/hybrid/create.h"
#include "lockstep/comm/mpi/create.h"
#include "lockstep/comm/nccl/create.h"
#include "lockstep/comm/shm/create.h"

namespace lockstep::internal {

std::deque<BackendEntry>& registered_backends() {
  // The one place that knows the backends; HACKING.md says how to add one. The
  // first of several backends for a device is the default.
  static std::deque<BackendEntry> entries{
      {.name = "lockstep",
       .default_devices = {c10::kCPU},
       .devices = {c10::kCPU},
       .create = hybrid::create,
       .can_be_made_again = true},
      {.name = "gloo",
       .default_devices = {c10::kCPU},
       .devices = {c10::kCPU, c10::kCUDA},
       .create = gloo::create,
       .python_may_join = true,
       .can_be_made_again = true},
      {.name = "shm",
       .default_devices = {c10::kCPU},
       .devices = {c10::kCPU},
       .create = shm::create,
       .can_be_made_again = true},
      {.name = "nccl",
       .default_devices = {c10::kCUDA},
       .devices = {c10::kCUDA},
       .create = nccl::create,
       .missing = nccl::missing,
       .python_may_join = true},
      {.name = "mpi",
       .default_devices = {c10::kCPU},
       .devices = {c10::kCPU},
       .create = mpi::create,
       .missing = mpi::missing,
       .world = mpi::world},
      {.name = "fake",
       .default_devices = {c10::kCPU, c10::kCUDA, c10::kHPU, c10::kXPU},
       .devices = {c10::kCPU, c10::kCUDA, c10::kHPU, c10::kXPU},
       .create = fake::create,
       .imagines_peers = true},
  };
  return entries;
}

}  // namespace lockstep::internal
