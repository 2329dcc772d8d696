#pragma once

#include <exception>
#include <string>

#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// Ends the use of a pipeline's group after an exception on this rank, so that
// no rank waits for ever, and throws. `where` says what the rank was doing:
// "in 2F3, forward of stage 2".
//
// If `failure` is the rank's own, it is written to the group's store, then this
// rank leaves the group, and `failure` is thrown as it is. If a message failed,
// because another rank has left before, c10::DistBackendError is thrown with
// what that rank has written; or `failure` itself, if no rank has written: then
// the rank died, and `failure` names it.
[[noreturn]] void fail_together(ProcessGroup& group,
                                const std::exception_ptr& failure,
                                const std::string& where);

}  // namespace lockstep::internal
