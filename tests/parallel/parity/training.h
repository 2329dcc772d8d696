#pragma once

#include <map>
#include <string>

#include "lockstep/checkpoint/snapshot.h"
#include "tests/parallel/parity/cases.h"

namespace lockstep::internal::testing {

// The tensors of one rank of a training, under the names that peer.py uses.
using Record = std::map<std::string, at::Tensor>;

// Trains `test` with our wrapper in the default group, from the parameters and
// data in `python`, the record of the Python rank with this number. Collective.
// Returns what training adds to that record: everything but "data", "target"
// and "initial.".
Record train(const Case& test, const Record& python);

}  // namespace lockstep::internal::testing
