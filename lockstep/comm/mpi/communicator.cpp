#include "lockstep/comm/mpi/communicator.h"

#include <optional>
#include <stdexcept>
#include <string>

#include "lockstep/comm/mpi/create.h"

namespace lockstep {

ProcessGroupGuard init_process_group_mpi(
    int communicator, const InitProcessGroupOptions& options) {
  if (const auto why = internal::mpi::missing(); !why.empty()) {
    throw std::invalid_argument("init_process_group_mpi: " + why);
  }
  internal::mpi::use_communicator(communicator);
  try {
    return init_process_group("mpi", options);
  } catch (...) {
    // init_process_group() may have failed before it used the communicator,
    // which the next init_process_group("mpi") must not take.
    internal::mpi::use_communicator(std::nullopt);
    throw;
  }
}

}  // namespace lockstep
