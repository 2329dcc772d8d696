#include "lockstep/comm/mpi/create.h"

#include <stdexcept>

#include "lockstep/base/module.h"
#include "lockstep/comm/mpi/create.h"

namespace lockstep::internal::mpi {
namespace {

Module& module() {
  // Loaded with global symbols: OpenMPI's own components may expect MPI's
  // there.
  static Module& loaded = *reinterpret_cast<OpenModule>(
      load_module("mpi_backend.so", kOpenModule, /*global=*/true))();
  return loaded;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  return module().create(request);
}

LaunchedWorld world(std::chrono::milliseconds timeout) {
  if (timeout <= std::chrono::milliseconds(0)) {
    throw std::invalid_argument("timeout is " +
                                std::to_string(timeout.count()) +
                                " ms; it must be more than 0");
  }
  return module().world(timeout);
}

void use_communicator(std::optional<int> handle) {
  module().use_communicator(handle);
}

std::string missing() {
  try {
    module();
    return {};
  } catch (const std::runtime_error& error) {
    return std::string("its module cannot be loaded: ") + error.what() +
           "; install OpenMPI (Debian: libopenmpi3 and openmpi-bin), and build "
           "Lockstep where its headers are (libopenmpi-dev)";
  }
}

}  // namespace lockstep::internal::mpi
