// Built if LibTorch has NCCL; each rank of a case needs a GPU, and the case
// skips if there are fewer.
#include "tests/comm/contract/contract.h"

LOCKSTEP_COLLECTIVE_CONTRACT(Nccl, "cuda:nccl", "cuda")
