// The state of a rank in the memory of its place: the next process of the place
// has it again, bit by bit.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "lockstep/optim/adam.h"
#include "lockstep/parallel/healing/state_records.h"

namespace lockstep::internal {
namespace {

using ::testing::UnorderedElementsAre;

// Counts what its rank has seen.
struct Seen {
  std::map<std::string, int64_t> state_dict() const { return {{"seen", seen}}; }
  void load_state_dict(const std::map<std::string, int64_t>& state) {
    seen = state.at("seen");
  }
  int64_t seen = 0;
};

// A process: two of them have different values until one loads.
struct Training {
  explicit Training(uint64_t seed) {
    at::manual_seed(seed);
    model = torch::nn::Linear(3, 2);
    optimizer = std::make_unique<optim::AdamW>(model->parameters(),
                                               optim::AdamWOptions{.lr = 0.1});
    state.model = model.ptr();
    state.optimizer = optimizer.get();
    state.items.emplace("seen", per_rank(seen));
  }
  void step() {
    optimizer->zero_grad();
    model(at::rand({4, 3})).sum().backward();
    optimizer->step();
    ++seen.seen;
    ++state.step;
  }
  at::Tensor weight() const { return model->weight.detach().clone(); }

  torch::nn::Linear model{nullptr};
  std::unique_ptr<optim::AdamW> optimizer;
  Seen seen;
  TrainingState state;
};

TEST(StateRecords, GiveTheNextProcessTheStateAfterEachOfTheLastTwoSteps) {
  const FileDescriptor place(::memfd_create("place", MFD_CLOEXEC));
  Training first(1);
  StateRecords records(place, 3, first.state);
  records.write(0);
  std::map<int64_t, at::Tensor> weights;
  for (int64_t step = 1; step <= 3; ++step) {
    first.step();
    records.write(step);
    weights[step] = first.weight();
  }
  EXPECT_THAT(records.steps(), UnorderedElementsAre(2, 3));

  Training next(2);
  StateRecords its(place, 3, next.state);
  const Snapshot loaded = its.load(2);
  EXPECT_EQ(loaded.step, 2);
  EXPECT_TRUE(next.weight().equal(weights[2]));
  EXPECT_EQ(next.seen.seen, 2);
  // The third step is forgotten. Random numbers, too, are those of the first
  // process.
  EXPECT_THAT(its.steps(), UnorderedElementsAre(2));
  next.step();
  EXPECT_TRUE(next.weight().equal(weights[3]));
  its.write(3);
  EXPECT_THAT(its.steps(), UnorderedElementsAre(2, 3));
}

TEST(StateRecords, RefusesTheRecordOfAnotherModel) {
  const FileDescriptor place(::memfd_create("place", MFD_CLOEXEC));
  Training first(1);
  StateRecords(place, 0, first.state).write(0);
  Training other(1);
  other.state.model = torch::nn::Linear(3, 5).ptr();
  other.state.optimizer = nullptr;
  EXPECT_THROW(StateRecords(place, 0, other.state).load(0),
               std::invalid_argument);
  EXPECT_THROW(StateRecords(place, 0, first.state).load(1), std::runtime_error);
}

TEST(IsDivided, IfARankHasStateOfItsOwn) {
  Training training(1);
  EXPECT_TRUE(is_divided(training.state));
  training.state.items.clear();
  EXPECT_FALSE(is_divided(training.state));
  training.state.items.emplace("seen", training.seen);
  EXPECT_FALSE(is_divided(training.state));
}

}  // namespace
}  // namespace lockstep::internal
