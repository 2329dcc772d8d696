#include "lockstep/parallel/comm_hooks/post_local_sgd_hook.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <limits>
#include <stdexcept>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/comm_hooks/hook_collectives.h"
#include "lockstep/state/state_tree.h"
#include "lockstep/worker/rank_environment.h"

namespace lockstep {
namespace {

ProcessGroupPtr ranks_of_this_host() {
  const auto local = internal::get_rank_env_int(
      "LOCAL_WORLD_SIZE", 1, std::numeric_limits<int>::max());
  if (!local) {
    throw std::invalid_argument(
        "PostLocalSGDState: there is no subgroup, and LOCAL_WORLD_SIZE, the "
        "number of ranks on a host, is not set; give a subgroup "
        "(new_subgroups()), or start the ranks with lockstep run");
  }
  return new_subgroups(static_cast<int>(*local));
}

}  // namespace

PostLocalSGDState::PostLocalSGDState(const PostLocalSGDOptions& given)
    : options(given) {
  if (options.start_local_sgd_iter < 0) {
    throw std::invalid_argument(
        c10::str("PostLocalSGDState: start_local_sgd_iter is ",
                 options.start_local_sgd_iter, "; give 0 or more steps"));
  }
  options.process_group =
      internal::group_or_default(std::move(options.process_group));
  if (!options.subgroup.require_member() &&
      options.post_local_gradient_allreduce) {
    options.subgroup = ranks_of_this_host();
  }
}

void PostLocalSGDState::load_state_dict(
    const std::map<std::string, int64_t>& state) {
  iter = internal::state_entry(state, "iter", "PostLocalSGDState");
}

CommHook post_local_sgd_hook(std::shared_ptr<PostLocalSGDState> state) {
  if (!state) {
    throw std::invalid_argument(
        "post_local_sgd_hook: the state is null; give a "
        "std::make_shared<PostLocalSGDState>(options)");
  }
  return [state = std::move(state)](GradBucket& bucket) {
    at::NoGradGuard no_grad;
    const auto& options = state->options;
    if (state->iter < options.start_local_sgd_iter) {
      auto averaged = internal::average(bucket.buffer(), options.process_group);
      if (!bucket.is_last()) return averaged;
      return internal::after_success(averaged, [state] { ++state->iter; });
    }
    if (!options.post_local_gradient_allreduce) {
      return completed_future(bucket.buffer());
    }
    return internal::average(bucket.buffer(), options.subgroup);
  };
}

}  // namespace lockstep
