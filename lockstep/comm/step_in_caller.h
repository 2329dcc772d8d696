#pragma once

#include <exception>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/buffers.h"
#include "lockstep/comm/collective_call.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/trace/flight_recorder.h"

namespace lockstep::internal {

// A collective that runs in the calling thread and has no Work: gives it a
// number and a flight record, and makes it the thread's current call while this
// object lives. Costs little beside an all_reduce of four bytes: it allocates
// nothing. `call` must outlive it. Internal to comm.
class StepInCaller {
 public:
  // `extent` and `type` are those of the user's tensors; none by default.
  explicit StepInCaller(Call& call, const Buffers::Extent& extent = {},
                        const ElementType& type = {})
      : call_(numbered(call)),
        started_(Deadline::after(call.timeout, now_)),
        current_{.operation = call.operation,
                 .number = call.number,
                 .entry = call.entry,
                 .dtype = type,
                 .function = user_function()},
        scope_(&current_),
        record_(inside(call.group)
                    .flight()
                    ->begin({.operation = call.operation,
                             .dtype = extent.dtype,
                             .reduce_op = call.reduce_op,
                             .number = call.number,
                             .in_elements = extent.in,
                             .out_elements = extent.out},
                            FlightState::started, now_)) {}
  // Without succeed() the collective has failed.
  ~StepInCaller() { end(/*failed=*/true); }
  StepInCaller(const StepInCaller&) = delete;
  StepInCaller& operator=(const StepInCaller&) = delete;

  void succeed() { end(/*failed=*/false); }
  // See Call::fail().
  [[noreturn]] void fail(const std::exception& error) {
    end(/*failed=*/true);
    call_.fail(started_, error);
  }

 private:
  static Call& numbered(Call& call) {
    call.number = inside(call.group).next_sequence_number();
    call.entry = inside(call.group).next_entry();
    return call;
  }
  void end(bool failed) {
    inside(call_.group).flight()->end(std::exchange(record_, 0), failed);
  }

  Call& call_;
  const Deadline::Clock::time_point now_ = Deadline::Clock::now();
  const Deadline started_;
  CurrentCall current_;
  const CurrentCallScope scope_;
  uint64_t record_;
};

}  // namespace lockstep::internal
