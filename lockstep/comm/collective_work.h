#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/buffers.h"
#include "lockstep/comm/collective_call.h"

// Starts operations, waits for them, and records them (span, flight record).
// Internal to comm.
namespace lockstep::internal {

// The values on which all ranks must agree.
struct Agreed {
  std::string text;  // the same on all: "SUM, Float [2, 3]"
  // How many elements go to each rank, and come from each rank; empty if the
  // text says it all.
  std::vector<int64_t> sends{};
  std::vector<int64_t> receives{};
};
using AgreedCall = std::function<Agreed()>;

// Numbers the call, compares `agreement` between the ranks if the group
// compares calls, and starts the operation. Waits for its end unless it is
// asynchronous. `start` returns the backend's work.
WorkPtr run_collective(Call call, bool async_op, Buffers buffers,
                       const AgreedCall& agreement,
                       const std::function<WorkPtr()>& start);

// Runs `step`, a blocking collective that c10d does not have, with a number, a
// flight record and errors in the words of `call`. The backend compares it like
// any other call.
void run_step(Call call, const std::function<void()>& step);

// Does the same as run_collective(), without a number and a comparison, for one
// side of a message.
WorkPtr run_message(Call call, bool async_op, Buffers buffers,
                    const std::function<WorkPtr()>& start);

// Ends a message of which the caller has no handle any more, so that its tensor
// is the caller's again; point_to_point.h says how far each backend can do
// that.
void give_up(Work& message);

// Joins several works into one, which has ended when all have, and has failed
// with the first of them that failed. Its future's value and its result() are
// the tensors of all of them, in that order.
WorkPtr join_works(std::vector<WorkPtr> works);

}  // namespace lockstep::internal
