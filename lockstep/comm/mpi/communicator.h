#pragma once

#include "lockstep/comm/init.h"

namespace lockstep {

// Does the same as init_process_group("mpi") for the ranks of a communicator
// that the program has, instead of MPI_COMM_WORLD. Every rank of the
// communicator must call. The communicator is duplicated and may be freed
// afterwards. MPI stays the program's: the program must have started it with
// MPI_THREAD_SERIALIZED at least (then no other thread may call MPI while a
// collective is under way; MPI_THREAD_MULTIPLE has no such limit), and must not
// finalise it before destroy_process_group().
//
// `communicator` is its Fortran handle, MPI_Comm_c2f(communicator), so that
// this header needs no MPI. Throws like init_process_group().
ProcessGroupGuard init_process_group_mpi(
    int communicator, const InitProcessGroupOptions& options = {});

}  // namespace lockstep
