// Where a rank of a training that heals is in the loops of its program.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/checkpoint/safetensors/snapshot_json.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/parallel/healing/loop_position.h"

namespace lockstep::internal {
namespace {

struct Loop {
  // Has the program take a batch and complete a step.
  void step() {
    next();
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

// Regression: a pass that began without set_epoch() was told as the end of the
// one before, in which nothing is left.
TEST(LoopPosition, APassThatFollowsAnotherBeginsAtItsBeginning) {
  Loop loop;
  for (int batch = 0; batch < 8; ++batch) loop.step();
  EXPECT_EQ(loop.of_sampler("position"), 64);
  loop.position.pass_ends();
  loop.next();
  loop.sampler.consumed(8);
  const auto status = loop.status();
  const StateTree top = item_values_of(status.at("samplers").at("sampler"));
  const auto* position = top.as<StateTree::Dict>()->find("position");
  EXPECT_EQ(*position->as<int64_t>(), 0);
  EXPECT_TRUE(loop.position.share_samples(status));
  loop.next();
  EXPECT_EQ(loop.of_sampler("position"), 0);
}

// A rank that has taken the state of another one has made its steps, but has
// not called next() as often.
TEST(LoopPosition, TheRankWhoseStateWasTakenStaysAhead) {
  Loop ahead;
  ahead.step();
  Loop behind;
  behind.next();
  behind.position.call_begins();
  ahead.next();
  behind.position.take_steps_of(ahead.status());
  behind.position.share_samples(ahead.status());
  EXPECT_TRUE(LoopPosition::is_ahead(ahead.status(), behind.status()));
  EXPECT_FALSE(LoopPosition::is_ahead(behind.status(), ahead.status()));
}

}  // namespace
}  // namespace lockstep::internal
