#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "lockstep/comm/backend_registry.h"

// The "mpi" backend (docs/mpi.md): CPU tensors over OpenMPI. This part is in
// every build. It loads the module that links MPI (Module) when that is first
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

// The interface of lib/lockstep/mpi_backend.so, which alone links MPI. There is
// one object for the life of the process. One thread at a time may call, as for
// init_process_group() and new_group().
class Module {
 public:
  virtual ~Module() = default;

  // Lets the next world() use the communicator with this Fortran handle
  // (MPI_Comm_c2f), or MPI_COMM_WORLD again (none). The communicator must live
  // until world() has returned.
  virtual void use_communicator(std::optional<int> handle) = 0;

  // Starts MPI unless it runs, and makes a communicator for a new default
  // group: a duplicate of MPI_COMM_WORLD unless use_communicator() named
  // another. Blocks until all its ranks have come: in MPI_Init without a
  // deadline, afterwards for `timeout` at most. Throws std::invalid_argument if
  // MPI has ended or its thread level is too low, and c10::DistBackendError.
  // Until create() has made the default group this process leaves without
  // MPI_Finalize: other ranks may wait for it in a call that only mpirun can
  // end.
  virtual LaunchedWorld world(std::chrono::milliseconds timeout) = 0;

  // Makes the group's backend. The default group ("0") has all ranks of
  // world(), which is called here if it was not before. Another group is made
  // from the latest world(): throws std::invalid_argument if there is none, or
  // if its ranks are not those of the default group.
  virtual c10::intrusive_ptr<c10d::Backend> create(
      const BackendRequest& request) = 0;
};

// The function that the module exports, with C linkage.
using OpenModule = Module* (*)();
inline constexpr const char* kOpenModule = "lockstep_open_mpi";

}  // namespace lockstep::internal::mpi
