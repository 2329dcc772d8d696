#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "lockstep/comm/backend_registry.h"

// The "mpi" backend (docs/mpi.md): CPU tensors over OpenMPI. This part is in
// every build. It loads the module that links MPI (module.h) when that is first
// needed.
namespace lockstep::internal::mpi {

// Blocks until the group's ranks are here, for request.timeout at most.
c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request);

// See Module. world() also throws std::invalid_argument unless `timeout` is
// more than 0, before MPI is started.
LaunchedWorld world(std::chrono::milliseconds timeout);
void use_communicator(std::optional<int> handle);

// Returns why the module cannot be loaded and what to do; empty if it is
// loaded.
std::string missing();

}  // namespace lockstep::internal::mpi
