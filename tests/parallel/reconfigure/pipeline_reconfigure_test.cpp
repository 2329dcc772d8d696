// Pipelines in a training whose ranks are replaced.
#include <string>

#include "tests/parallel/reconfigure/replaced_training.h"

namespace lockstep::internal::testing {
namespace {

class PipelineReconfigure : public ReplacedTraining {};

// A rank dies in a later micro-batch than the first.
TEST_F(PipelineReconfigure, WithOneStageARank) {
  train("pipeline:GPipe", 2, {{1, "2:forward#2"}, {0, "4:backward#3"}});
  train("pipeline:1F1B", 3,
        {{1, "2:forward#4"},
         {0, "4:backward#2"},
         {2, "5:computed"},
         {0, "6:updated"}});
}

class EverySchedule : public ReplacedTraining,
                      public ::testing::WithParamInterface<const char*> {};

TEST_P(EverySchedule, WithTwoStagesARank) {
  train(std::string("pipeline:") + GetParam(), 2,
        {{0, "2:forward#5"}, {1, "4:backward#5"}, {0, "5:backward#2"}});
}

INSTANTIATE_TEST_SUITE_P(PipelineReconfigure, EverySchedule,
                         ::testing::Values("LoopedBFS", "Interleaved1F1B",
                                           "InterleavedZeroBubble",
                                           "ZBVZeroBubble", "DualPipeV"));

TEST_F(PipelineReconfigure, WithATiedWeight) {
  train("pipeline:1F1B+tied", 2,
        {{1, "2:forward#2"}, {0, "3:backward#3"}, {1, "5:computed"}});
  // One rank has both copies.
  train("pipeline:ZBVZeroBubble+tied", 2,
        {{0, "2:backward#2"}, {1, "3:forward#3"}});
}

TEST_F(PipelineReconfigure, WithReplicas) {
  train("pipeline:1F1B+replicas", 4,
        {{3, "2:forward#2"}, {0, "3:backward#3"}, {2, "5:computed"}});
  train("pipeline:InterleavedZeroBubble+replicas", 4, {{1, "2:backward#2"}});
}

TEST_F(PipelineReconfigure, LeavesNothing) {
  leave_nothing("pipeline:1F1B+tied", 2);
}

}  // namespace
}  // namespace lockstep::internal::testing
