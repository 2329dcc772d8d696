#include "tests/comm/contract/contract.h"

LOCKSTEP_COLLECTIVE_CONTRACT(ThreeRanksAHost, "cpu:lockstep", "cpu", 3)
