// Where a rank of a training that heals is in the loops of its program.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/data/distributed_sampler.h"
#include "lockstep/parallel/healing/loop_position.h"

namespace lockstep::internal {
namespace {

struct Loop {
  // Has the program take a batch and complete a step.
  void step() {
    EXPECT_TRUE(next());
    position.call_begins();
    EXPECT_TRUE(position.must_run());
    sampler.consumed(8);
    ++state.step;
    position.step_has_ended();
    position.call_has_ended();
  }
  bool next() {
    return position.next_begins(this, [this] { sampler.begin_pass(); });
  }
  LoopPosition::Status status() const {
    LoopPosition::Status status = LoopPosition::Status::object();
    position.add_to(status);
    return status;
  }
  int64_t of_sampler(const char* name) const {
    return sampler.state_dict().at(name);
  }

  torch::nn::Linear model{2, 1};
  DistributedSampler sampler{64};
  TrainingState state{.model = model.ptr(), .items = {{"sampler", sampler}}};
  LoopPosition position{state};
};

// A rank is lost after the last step that the program makes in an epoch.
TEST(LoopPosition, AnEpochThatIsSelectedAfterALossIsNotTakenBack) {
  for (const bool selects : {true, false}) {
    Loop loop;
    loop.step();
    EXPECT_FALSE(loop.position.share_samples(loop.status()));
    if (selects) {
      loop.state.epochs_run = 0;
      loop.sampler.set_epoch(1);
    }
    EXPECT_TRUE(loop.next());
    EXPECT_EQ(loop.of_sampler("epoch"), selects ? 1 : 0);
    EXPECT_EQ(loop.of_sampler("position"), selects ? 0 : 8);
  }
}

// It has taken the state of one that has completed the call, and before it
// knows that all have, another rank is lost.
TEST(LoopPosition, ACallThatIsToBePassedOverCounts) {
  Loop ahead;
  ahead.step();
  Loop behind;
  behind.next();
  behind.position.call_begins();
  EXPECT_EQ(behind.status().at("calls"), 0);
  behind.position.take_steps_of(ahead.status());
  EXPECT_EQ(behind.status().at("calls"), 1);
  EXPECT_FALSE(behind.position.must_run());
  EXPECT_TRUE(behind.position.was_passed_over());
  EXPECT_EQ(behind.position.numbers_after().step, 1);
}

}  // namespace
}  // namespace lockstep::internal
