#include "lockstep/comm/collectives.h"

#include <c10/util/StringUtil.h>

#include "lockstep/comm/collective_work.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/roll_call.h"
#include "lockstep/comm/running_call.h"

namespace lockstep {

WorkPtr barrier(const CollectiveOptions& options) {
  internal::Call call("barrier", options.group, options.timeout);
  auto& backend = call.backend();
  const auto opts =
      internal::backend_options<c10d::BarrierOptions>(call, options.async_op);
  internal::Buffers no_tensors(call);
  return internal::run_collective(
      std::move(call), options.async_op, std::move(no_tensors),
      [] { return internal::Agreed{}; }, [&] { return backend.barrier(opts); });
}

void monitored_barrier(const MonitoredBarrierOptions& options) {
  internal::Call call("monitored_barrier", options.group, options.timeout);
  call.backend();  // throws if the group was destroyed
  call.number = internal::inside(call.group).next_sequence_number();
  internal::RunningCall running(call, {}, internal::FlightState::started,
                                internal::Operation::Spans::nested);
  try {
    const auto given =
        internal::roll_call(*call.group, call.operation, running.started(),
                            internal::AfterRollCall::may_leave);
    for (int member = 0; member < call.group->size(); ++member) {
      if (given[member] == call.operation) continue;
      // That rank compares its calls, and has come with another call.
      throw internal::Disagreement(c10::str(
          "rank ", call.group->global_rank(member), " called ",
          given[member].substr(0, given[member].find('\n')), " instead"));
    }
  } catch (const std::exception& error) {
    running.fail(error);
  }
  running.succeed();
}

}  // namespace lockstep
