// ZeroRedundancyOptimizer in a training whose ranks are replaced.
#include <string>
#include <vector>

#include "tests/parallel/reconfigure/replaced_training.h"

namespace lockstep::internal::testing {
namespace {

class ZeroReconfigure : public ReplacedTraining {};

TEST_F(ZeroReconfigure, FromParameters) {
  train("zero:parameters", 2,
        {{1, "2:forward"},
         {0, "3:backward"},
         {1, "4:stepping"},
         {0, "6:stepped"}});
}

TEST_F(ZeroReconfigure, FromAWrapper) {
  train("zero:wrapper", 3,
        {{1, "1:forward"},
         {0, "3:backward"},
         {2, "4:stepping"},
         {0, "4:stepped"},
         {1, "6:updated"}});
}

TEST_F(ZeroReconfigure, WithOneCopyOfTheParameters) {
  train("zero:shared", 3,
        {{1, "1:forward"},
         {0, "3:backward"},
         {2, "4:stepping"},
         {0, "4:stepped"},
         {1, "6:updated"}});
}

TEST_F(ZeroReconfigure, SteppingInBackward) {
  train("zero:in_backward", 2,
        {{1, "2:forward"},
         {0, "3:stepping#2"},
         {1, "4:stepped"},
         {0, "5:computed"}});
}

TEST_F(ZeroReconfigure, WithWholeParametersAndLowPrecision) {
  train("zero:whole", 2, {{1, "2:backward"}, {0, "3:stepped"}});
  train("zero:bfloat16", 2, {{1, "2:backward"}, {0, "3:stepped"}});
}

TEST_F(ZeroReconfigure, LeavesNothing) {
  leave_nothing("zero:parameters", 2);
  leave_nothing("zero:wrapper", 2);
  leave_nothing("zero:shared", 2);
}

}  // namespace
}  // namespace lockstep::internal::testing
