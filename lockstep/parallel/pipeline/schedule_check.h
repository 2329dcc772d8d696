#pragma once

#include <vector>

#include "lockstep/parallel/pipeline/schedule.h"

namespace lockstep {

// The facts that check_pipeline_schedule() finds out about a right schedule.
struct PipelineScheduleFacts {
  int stages = 0;
  int micro_batches = 0;
  std::vector<int> rank_of_stage{};
  // For each rank: the most activations (of one micro-batch in one stage) that
  // it keeps at one time. One is kept from its forward until its backward, or,
  // if that is in two parts, until the second part.
  std::vector<int> peak_activations{};
};

// Checks a schedule with or without messages (without, it is checked with those
// that with_messages() adds):
// - each stage from 0 on has one rank, and each rank a stage;
// - each micro-batch from 0 on has in each stage one F, and then one B, or one
//   I and then one W;
// - each rank has what an action needs before the action, from a stage of its
//   own or by a receive, and each receive has its send;
// - no rank waits for ever, even if each send blocks until its receiver is at
//   the receive (the sends of MPI and of NCCL may do so).
// Throws std::invalid_argument with what is wrong first; the last error names
// what each rank waits in.
PipelineScheduleFacts check_pipeline_schedule(const PipelineSchedule& schedule);

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
