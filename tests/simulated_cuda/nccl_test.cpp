// The contract of collectives on simulated NCCL.

#include "tests/comm/contract/contract.h"
#include "tests/comm/contract/nccl_limits.h"

LOCKSTEP_COLLECTIVE_CONTRACT(SimulatedNccl, "cuda:nccl", "cuda", 0,
                             lockstep::internal::testing::nccl_limits())
