#include "lockstep/optim/lr_scheduler/lr_lambdas.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace lockstep::internal {

void LRLambdas::require(size_t groups, const char* scheduler) const {
  const bool empty = std::any_of(functions_.begin(), functions_.end(),
                                 [](const Function& f) { return !f; });
  if (functions_.empty() || empty) {
    throw std::invalid_argument(
        std::string(scheduler) +
        ": lr_lambda is not given; give a function from the epoch to a factor, "
        "or a list with one for each parameter group");
  }
  if (!for_all_ && functions_.size() != groups) {
    throw std::invalid_argument(
        std::string(scheduler) + ": lr_lambda has " +
        std::to_string(functions_.size()) +
        " functions, but the optimizer has " + std::to_string(groups) +
        " parameter groups; give one function for all, or one for each group");
  }
}

void LRLambdas::list_state(StateFields& fields, size_t groups) {
  fields.add(
      "lr_lambdas", [groups] { return StateTree(StateTree::List(groups)); },
      [](const StateTree&) -> std::function<void()> { return [] {}; });
}

}  // namespace lockstep::internal
