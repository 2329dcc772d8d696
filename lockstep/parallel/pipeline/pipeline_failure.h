#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// Ends the use of a pipeline's group, and of other groups of its stages, after
// an exception on this rank, so that no rank waits for ever, and throws.
// `where` says what the rank was doing: "in 2F3, forward of stage 2".
//
// The failure is written to the stores of all these groups, then this rank
// leaves them, unless it is the pipeline's only one, with the same words for
// those that share memory with it. If another rank was the cause, these are the
// words about that rank. No words have a stack trace. If `failure` is the
// rank's own, it is thrown as it is; a StageMistake as std::invalid_argument
// with the rank and `where`, as all other ranks get it. If a message or a
// collective failed, because another rank has left before,
// c10::DistBackendError is thrown with what that rank has written; or `failure`
// itself, if no rank has written: then a rank died, and `failure` names it.
[[noreturn]] void fail_together(const std::vector<ProcessGroupPtr>& groups,
                                const std::exception_ptr& failure,
                                const std::string& where);

// Is thrown for what a stage or the loss has returned, if a pipeline cannot use
// it. The text does not say where: Pipeline::step() and eval() put rank, stage
// and micro-batch before it, and throw std::invalid_argument.
class StageMistake : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace lockstep::internal
