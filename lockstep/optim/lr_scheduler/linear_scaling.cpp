#include "lockstep/optim/lr_scheduler/linear_scaling.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "lockstep/comm/init.h"

namespace lockstep::optim {

LinearLROptions scale_lr_linearly(torch::optim::Optimizer& optimizer,
                                  const LinearScalingOptions& options) {
  if (!(options.scale >= 0) || !std::isfinite(options.scale) ||
      options.warmup_iters < 1) {
    throw std::invalid_argument(
        "scale_lr_linearly: scale is " + std::to_string(options.scale) +
        " and warmup_iters " + std::to_string(options.warmup_iters) +
        "; give a scale above 0 (or 0 for the world size) and at least 1 "
        "step of warm-up");
  }
  const double world = is_initialized() ? get_world_size() : 1;
  const double scale = options.scale > 0 ? options.scale : world;
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(group.options().get_lr() * scale);
  }
  return {.start_factor = std::min(1.0, 1 / scale),
          .end_factor = 1,
          .total_iters = options.warmup_iters};
}

}  // namespace lockstep::optim
