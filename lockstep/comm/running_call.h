#pragma once

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/buffers.h"
#include "lockstep/comm/collective_call.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/trace/operation.h"

namespace lockstep::internal {

// Begins the operation that `call` describes. `extent` is that of the user's
// tensors.
inline Operation begin_operation(const Call& call,
                                 const Buffers::Extent& extent,
                                 FlightState state, Operation::Spans spans,
                                 Deadline::Clock::time_point now) {
  return {*inside(call.group).flight(),
          {.operation = call.operation,
           .dtype = extent.type.name,
           .reduce_op = call.reduce_op,
           .number = call.number,
           .peer = call.peer,
           .in_elements = extent.in,
           .out_elements = extent.out},
          state,
          spans,
          extent.bytes,
          now};
}

// A call while its caller's thread is in it: begins the operation, and makes it
// the thread's current call while this object lives. Costs little beside an
// all_reduce of four bytes: it allocates nothing. `call`, which has its number,
// must outlive it, or else take() must have been called. Internal to comm.
class RunningCall {
 public:
  // `others`: see CurrentCall.
  RunningCall(const Call& call, const Buffers::Extent& extent,
              FlightState state, Operation::Spans spans,
              std::vector<ElementType> others = {})
      : call_(call),
        started_(Deadline::after(call.timeout, now_)),
        current_{.operation = call.operation,
                 .number = call.number,
                 .entry = call.entry,
                 .parts = call.parts,
                 .dtype = extent.type,
                 .others = std::move(others),
                 .function = user_function()},
        scope_(&current_),
        operation_(begin_operation(call, extent, state, spans, now_)) {}
  // Ends the operation: it has failed unless succeed() was called.
  ~RunningCall() { operation_.end(failed_); }
  RunningCall(const RunningCall&) = delete;
  RunningCall& operator=(const RunningCall&) = delete;

  const Deadline& started() const { return started_; }
  void start() { operation_.start(); }
  void succeed() { failed_ = false; }
  // See Call::fail().
  [[noreturn]] void fail(const std::exception& error,
                         const std::string& more = {}) {
    operation_.end(/*failed=*/true);
    call_.fail(started_, error, more);
  }
  // Returns the operation, which goes on after the call.
  Operation take() { return std::move(operation_); }

 private:
  const Call& call_;
  const Deadline::Clock::time_point now_ = Deadline::Clock::now();
  const Deadline started_;
  CurrentCall current_;
  const CurrentCallScope scope_;
  Operation operation_;
  bool failed_ = true;
};

}  // namespace lockstep::internal
