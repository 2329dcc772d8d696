#include "tests/comm/contract/contract.h"

// What mpi_test.cpp runs under mpirun; mpi_world.cpp is its harness.
LOCKSTEP_COLLECTIVE_CONTRACT(Mpi, "mpi")
