// The contract of collectives on simulated NCCL.

#include "tests/comm/contract/contract.h"

LOCKSTEP_COLLECTIVE_CONTRACT(SimulatedNccl, "cuda:nccl", "cuda")
