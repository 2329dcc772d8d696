#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/optim/lr_scheduler/state_fields.h"

namespace lockstep::internal {

// The functions of LambdaLR and MultiplicativeLR: one for all parameter groups,
// or a list with one for each.
//
//   .lr_lambda = [](int64_t epoch) { return 1.0 / (1 + epoch); }
//   .lr_lambda = {first, second}
class LRLambdas {
 public:
  using Function = std::function<double(int64_t epoch)>;

  LRLambdas() = default;  // not given
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, LRLambdas> &&
             std::is_invocable_r_v<double, F&, int64_t>)
  LRLambdas(F function) : functions_{std::move(function)}, for_all_(true) {}
  LRLambdas(std::initializer_list<Function> functions)
      : LRLambdas(std::vector<Function>(functions)) {}
  LRLambdas(std::vector<Function> functions)
      : functions_(std::move(functions)) {}

  // Throws std::invalid_argument, naming `scheduler`, unless there is a
  // function for each of `groups` groups.
  void require(size_t groups, const char* scheduler) const;

  // Returns the factor of a group; require() was called.
  double factor(size_t group, int64_t epoch) const {
    return functions_[for_all_ ? 0 : group](epoch);
  }

  // Adds Python's `lr_lambdas`, which has None for each function: functions are
  // not saved.
  static void list_state(StateFields& fields, size_t groups);

 private:
  std::vector<Function> functions_;
  bool for_all_ = false;
};

}  // namespace lockstep::internal
