#include "tests/comm/contract/contract.h"

// mpi_test.cpp runs this under mpirun; mpi_world.cpp is its harness.
LOCKSTEP_COLLECTIVE_CONTRACT(Mpi, "mpi")
