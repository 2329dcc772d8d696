#include "tests/comm/contract/contract.h"

LOCKSTEP_COLLECTIVE_CONTRACT(SharedMemory, "cpu:shm")
