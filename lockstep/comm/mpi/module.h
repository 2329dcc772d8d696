#pragma once

#include <chrono>
#include <optional>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/launched_world.h"

namespace lockstep::mpi {

// What lib/lockstep/mpi_backend.so, which alone links MPI, gives to the rest.
// One object for the life of the process; calls from one thread at a time, as
// init_process_group() and new_group() are.
class Module {
 public:
  virtual ~Module() = default;

  // The next world() is that of the communicator with this Fortran handle
  // (MPI_Comm_c2f), or again of MPI_COMM_WORLD (none). The communicator must
  // live until world() has returned.
  virtual void use_communicator(std::optional<int> handle) = 0;

  // Starts MPI unless it runs, and makes a communicator for a new default
  // group, of MPI_COMM_WORLD unless use_communicator() named another. Blocks
  // until all its ranks are here: in MPI_Init without a deadline, in the rest
  // for `timeout` at most. Throws std::invalid_argument where MPI has ended or
  // its threads are too weak, c10::DistBackendError. Until create() has made
  // the default group this process leaves without MPI_Finalize: others may wait
  // for it where only mpirun can end them.
  virtual LaunchedWorld world(std::chrono::milliseconds timeout) = 0;

  // The group's backend. The default group ("0") is the whole of world(), which
  // is called here if it was not. Another group is made of the latest world():
  // std::invalid_argument if there is none, or its ranks are not those of the
  // default group.
  virtual c10::intrusive_ptr<c10d::Backend> create(
      const BackendRequest& request) = 0;
};

// What the module exports, of C linkage.
using OpenModule = Module& (*)();
inline constexpr const char* kOpenModule = "lockstep_open_mpi";

}  // namespace lockstep::mpi
