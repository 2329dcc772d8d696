#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep::internal {

// Returns one of the variables by which a launcher tells a process its place:
// RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
// Nothing if it is unset or empty.
//
// If a scheduler started this process as one of several tasks, what is not set
// is taken from the scheduler's own variables, unless RANK or WORLD_SIZE differ
// from them: then a launcher within the task started the process.
//
//   srun     SLURM_STEP_ID and the others of a step (srun(1), "OUTPUT
//            ENVIRONMENT VARIABLES")
//   mpirun   OMPI_COMM_WORLD_RANK ... of Open MPI
//   mpiexec  PMI_RANK, PMI_SIZE, MPI_LOCALRANKID ... of MPICH and Intel MPI
//
// MASTER_ADDR is then the first host of Slurm's step, or 127.0.0.1 if all tasks
// are on one host; Open MPI and MPICH do not tell the host of rank 0, so it is
// unset if there are several. MASTER_PORT is a number from 20000 to 29999 that
// follows from the job's number and the user.
//
// Throws std::invalid_argument that names a variable of the scheduler if its
// value is not what it should be, and in a standby process that has no place
// yet (standby_place.h): the launcher is told, and uses it no more. As
// get_env(), it must not be called while another thread changes the
// environment.
std::optional<std::string> get_rank_env(const char* name);

// Returns the same as an integer in [lowest, highest]; throws as get_env_int().
std::optional<int64_t> get_rank_env_int(const char* name, int64_t lowest,
                                        int64_t highest);

// Returns the program that started this process as one of several tasks,
// "srun", "mpirun" or "mpiexec", if get_rank_env() takes its variables.
std::optional<std::string> scheduler_of_ranks();

}  // namespace lockstep::internal
