// Built where LibTorch has NCCL; its cases need a GPU a rank and skip where
// there are fewer.
#include "tests/comm/contract/contract.h"

LOCKSTEP_COLLECTIVE_CONTRACT(Nccl, "cuda:nccl", "cuda")
