#pragma once

#include <map>

#include "lockstep/parallel/pipeline/schedule.h"

namespace lockstep::internal {

// Which rank has each stage, by the first action that names the stage.
// `schedule` may be wrong: a stage may be missing.
class StagePlaces {
 public:
  explicit StagePlaces(const PipelineSchedule& schedule);

  // The number of the last stage, plus one.
  int stages() const { return stages_; }
  // The rank of `stage`; -1 if no rank has it.
  int rank_of(int stage) const;
  // Whether both have a rank, and not the same.
  bool are_apart(int stage, int other) const;

  // The message that follows `action`, as the sender's and as the receiver's
  // action: kind send_... or recv_...
  struct Message {
    PipelineAction send;
    PipelineAction recv;
  };
  // Whether `action` computes something that another rank needs.
  bool is_sent(const PipelineAction& action) const;
  Message message_of(const PipelineAction& action) const;

  // The action, of another stage, whose result must have arrived before
  // `action` can be computed: the receive if that is on another rank, otherwise
  // the other stage's action; for a backward either B or I serves, and B is
  // returned. Returns false if `action` needs nothing of another stage.
  bool source_of(const PipelineAction& action, PipelineAction& source) const;

 private:
  int stages_ = 0;
  std::map<int, int> ranks_;
};

// Whether `done` contains `source`, or, for a B, the I of the same micro-batch.
template <typename Set>
bool has_source(const Set& done, PipelineAction source) {
  if (done.contains(source)) return true;
  if (source.kind != PipelineActionKind::backward) return false;
  source.kind = PipelineActionKind::backward_input;
  return done.contains(source);
}

}  // namespace lockstep::internal
