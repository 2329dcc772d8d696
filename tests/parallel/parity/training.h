#pragma once

#include <map>
#include <string>

#include "lockstep/checkpoint/snapshot.h"
#include "tests/parallel/parity/cases.h"

namespace lockstep::testing {

// The tensors of one rank of a training, under the names that peer.py says.
using Record = std::map<std::string, at::Tensor>;

// Trains `test` by ours in the default group, from the parameters and data of
// `python`, this rank's record of the peer. Collective. Returns what training
// adds to those: everything but "data", "target" and "initial.".
Record train(const Case& test, const Record& python);

}  // namespace lockstep::testing
