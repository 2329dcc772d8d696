#pragma once

#include "lockstep/parallel/pipeline/schedule.h"

namespace lockstep {

// Returns `schedule`, which must have no sends and no receives, with the
// messages that it needs and without its empty slots. Stages s and s + 1 on
// one rank need none. UNSHARD, RESHARD and REDUCE_GRAD are left out.
//
// Each send stands directly after the action that computes what it sends, and
// the receive is placed when
// the sender sends. So all sends and receives have one order over all ranks:
// even if each send blocked until its receiver receives, no rank would wait for
// ever, and the messages between two ranks are sent and received in one order
// (NCCL has no tags). PyTorch places them alike (_add_send_recv).
//
// Throws std::invalid_argument if the forwards and backwards themselves wait
// for each other for ever; it names what each rank waits in.
PipelineSchedule with_messages(const PipelineSchedule& schedule);

// Returns the schedule without its messages.
PipelineSchedule without_messages(const PipelineSchedule& schedule);

}  // namespace lockstep
