#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// Says which ranks did not come, "rank 2, 5 did not come in time" or "rank 3
// died", by their ranks in the default group.
class RollCallError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Says what each rank does after a roll call.
enum class AfterRollCall {
  goes_on,    // with a collective, for instance
  may_leave,  // rank 0, too, which may host the store
  throws,     // whatever the texts are
};

// Exchanges texts: every member of `group` gives one and gets those of all, in
// rank order. It uses the group's store, so it depends on no backend and knows
// which ranks have not come. Keys of the n-th roll call of a group:
// "roll_call/<n>/<group rank>", which each rank removes after the next roll
// call; if this one failed, "roll_call/<n>/absent" says why (last_words.h).
//
// Blocks until the deadline at most, and for less than a second after a rank on
// this host has died or left (life_signs.h). Then it throws RollCallError, the
// same on every rank. That takes up to a second longer, so that the rank that
// hosts the store does not leave before the others know. If the store is gone,
// the error says so, with the rank that hosted it.
//
// With `may_leave`, and if the texts are equal, rank 0 returns when the others
// have read them, after 2 s, or at the deadline: "roll_call/<n>/read" counts
// them, until rank 0 removes it.
//
// With `throws`, the text of a rank that does not come in time is empty, and
// the call returns when all ranks that came have read the texts, or after a
// second: the store may end with the first rank that throws.
// "roll_call/<n>/read/<group rank>" says that a rank has read.
//
// If the group's other ranks are imagined (backend_registry.h), each of them
// gives the text of this rank.
std::vector<std::string> roll_call(
    ProcessGroup& group, const std::string& text, const Deadline& deadline,
    AfterRollCall after = AfterRollCall::goes_on);

}  // namespace lockstep::internal
