// Tensor, sequence and context parallelism in a training whose ranks are
// replaced.
#include "tests/parallel/reconfigure/replaced_training.h"

namespace lockstep::internal::testing {
namespace {

class TensorReconfigure : public ReplacedTraining {};

TEST_F(TensorReconfigure, WithDividedLayers) {
  train("tensor:layers", 2,
        {{1, "2:forward"}, {0, "3:backward"}, {1, "5:computed"}});
}

TEST_F(TensorReconfigure, WithDividedSequences) {
  train("tensor:sequence", 3,
        {{1, "2:forward"}, {0, "3:backward"}, {2, "5:updated"}});
}

TEST_F(TensorReconfigure, WithContextParallelAttention) {
  train("tensor:ring", 3, {{1, "2:forward"}, {0, "3:backward"}});
  train("tensor:ulysses", 2, {{1, "2:forward"}, {0, "3:backward"}});
}

TEST_F(TensorReconfigure, LeavesNothing) {
  leave_nothing("tensor:layers", 2);
  leave_nothing("tensor:ring", 2);
}

}  // namespace
}  // namespace lockstep::internal::testing
