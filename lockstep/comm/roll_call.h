#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {

// Ranks that did not come: "rank 2, 5 did not come in time" or "rank 3 died",
// by their numbers in the default group.
class RollCallError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Every member of `group` gives a text and gets those of all, in the order of
// the group. Goes over the group's store: it depends on no backend, and knows
// who has not come. Keys: "roll_call/<n>/<group rank>" in the n-th of a group;
// each rank removes its own when the next has taken place; where one failed,
// "absent" says why, and "told" counts the ranks that know.
//
// Blocks to the deadline at most, and less than a second after a rank of this
// host has died or left (life_signs.h); then throws RollCallError, the same on
// every rank. That takes up to a second longer, so that the host of the store
// does not leave before the others know. If the store is gone, the error says
// so, with the rank that hosted it.
std::vector<std::string> roll_call(ProcessGroup& group, const std::string& text,
                                   const Deadline& deadline);

}  // namespace lockstep
