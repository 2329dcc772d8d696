#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/buffers.h"
#include "lockstep/comm/collective_call.h"

// How an operation is started, waited for and told about. Internal to comm.
namespace lockstep {

// What all ranks must agree on.
struct Agreed {
  std::string text;  // the same on all: "SUM, Float [2, 3]"
  // Elements that go to each rank, and come from each; empty where the text
  // says it all.
  std::vector<int64_t> sends{};
  std::vector<int64_t> receives{};
};
using Agreement = std::function<Agreed()>;

// Starts the operation and, unless it is asynchronous, waits for its end.
// Numbers the call first, and compares `agreement` over the ranks where the
// group wants that. `start` returns the backend's work.
WorkPtr run_collective(Call call, bool async_op, Buffers buffers,
                       const Agreement& agreement,
                       const std::function<WorkPtr()>& start);

// Runs `step`, a blocking collective that c10d does not have: with a number and
// a flight record, and errors in the words of `call`. Its backend compares it
// as any other.
void run_step(Call call, const std::function<void()>& step);

// As run_collective() without a number and a comparison, for one side of a
// message.
WorkPtr run_message(Call call, bool async_op, Buffers buffers,
                    const std::function<WorkPtr()>& start);

// Ends a message that nobody has a handle of any more, so that its tensor is
// the caller's again; point_to_point.h says how far each backend can.
void give_up(Work& message);

// Several works as one: it has ended when all have, and failed with the first
// that failed.
WorkPtr join_works(std::vector<WorkPtr> works);

}  // namespace lockstep
