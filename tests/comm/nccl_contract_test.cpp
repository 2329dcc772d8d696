// Built if LibTorch has NCCL; each rank of a case needs a GPU, and the case
// skips if there are fewer.
#include "tests/comm/contract/contract.h"
#include "tests/comm/contract/nccl_limits.h"

LOCKSTEP_COLLECTIVE_CONTRACT(Nccl, "cuda:nccl", "cuda", 0,
                             lockstep::internal::testing::nccl_limits())
