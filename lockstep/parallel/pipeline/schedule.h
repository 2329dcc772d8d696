#pragma once

#include <compare>
#include <string>
#include <vector>

// The schedule of a pipeline as data: what each rank computes, and when it
// sends and receives, in which order. schedules.h makes the known ones; this
// file reads and writes them as PyTorch does
// (torch.distributed.pipelining.schedules: _Action, and the CSV files of
// PipelineScheduleMulti). Nothing here needs LibTorch.
namespace lockstep {

// The action of a rank with one micro-batch in one stage. The comment is the
// name in PyTorch's text.
enum class PipelineActionKind {
  forward,          // F
  backward,         // B: gradients of the stage's inputs and of its parameters
  backward_input,   // I: only those of its inputs
  backward_weight,  // W: only those of its parameters, after I
  // Messages of activations to the next stage, and of their gradients to the
  // previous one. A send belongs to the stage that has computed what is sent, a
  // receive to the stage that will compute with it.
  send_forward,   // SEND_F
  recv_forward,   // RECV_F
  send_backward,  // SEND_B
  recv_backward,  // RECV_B
  // Found in files that PyTorch writes; they have no micro-batch. Running a
  // schedule skips them.
  unshard,      // UNSHARD
  reshard,      // RESHARD
  reduce_grad,  // REDUCE_GRAD
};

struct PipelineAction {
  int stage = 0;
  PipelineActionKind kind{};
  int micro_batch = 0;  // 0 if the kind has none
  auto operator<=>(const PipelineAction&) const = default;
};

// The work of one rank in one slot: nothing, one action, or a forward and a
// backward of which a runtime may overlap the one with the other (OVERLAP_F_B;
// this library runs them one after the other).
using PipelineSlot = std::vector<PipelineAction>;

struct PipelineSchedule {
  // For each rank of the pipeline's group its slots. Slots of different ranks
  // with one index belong together only in drawings: a rank goes on as soon as
  // it has what the next action needs.
  std::vector<std::vector<PipelineSlot>> ranks{};

  bool operator==(const PipelineSchedule&) const = default;
};

// Whether the kind is F, B, I or W; and whether it is a send or a receive.
bool is_compute(PipelineActionKind kind);
bool is_message(PipelineActionKind kind);

// "2F0", "3SEND_F1", "1UNSHARD".
std::string to_string(const PipelineAction& action);
// "", "2F0" or "(0F4;3B1)OVERLAP_F_B".
std::string to_string(const PipelineSlot& slot);
// Do the opposite. Throw std::invalid_argument with the text if it is not one
// of those.
PipelineAction parse_pipeline_action(const std::string& text);
PipelineSlot parse_pipeline_slot(const std::string& text);

// The schedule in PyTorch's CSV form: a line for each rank, a field for each
// slot, lines end with CR LF.
std::string to_csv(const PipelineSchedule& schedule);
// Throws std::invalid_argument with line and field if the text is not of that
// form. Lines may end with LF alone.
PipelineSchedule parse_pipeline_csv(const std::string& text);
// The same for files. Throw std::runtime_error with path and reason if the file
// cannot be written or read.
void save_pipeline_csv(const PipelineSchedule& schedule,
                       const std::string& path);
PipelineSchedule load_pipeline_csv(const std::string& path);

// The schedule as a table for reading: a line for each rank, a column for each
// slot.
std::string to_table(const PipelineSchedule& schedule);

// Returns the schedule with empty slots where a rank waits for another one if
// each action takes one slot and messages take no time; empty slots that
// `schedule` has are dropped before. For to_table(). Throws
// std::invalid_argument if a rank would wait for ever.
PipelineSchedule aligned(const PipelineSchedule& schedule);

}  // namespace lockstep
