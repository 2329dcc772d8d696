#include "lockstep/observe/clock_offset.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/util/ApproximateClock.h>

#include <limits>

#include "lockstep/comm/point_to_point.h"
#include "lockstep/trace/current_call.h"

namespace lockstep::internal {
namespace {

// The first round trips wait until rank 0 has come, and make connections.
constexpr int kRoundTrips = 8;
// A tag that programs hardly use, so that these messages do not meet theirs.
constexpr int kTag = kMaxTag - 19;

}  // namespace

int64_t trace_clock() { return c10::getTime(); }

ClockOffset measure_clock_offset(const ProcessGroupPtr& group,
                                 const std::function<int64_t()>& clock) {
  const UserFunction function("Profiler");
  const at::RecordFunctionGuard unseen(/*is_enabled=*/false);
  const at::NoGradGuard no_grad;
  const auto device = group->control_device();
  // In a dry run the peers do not exist, and nor do their clocks.
  if (group->backend(device.type()).getBackendName() == "fake") return {};
  const PointToPointOptions options{.group = group,
                                    .tag = device.is_cpu() ? kTag : 0};
  auto message = at::zeros({1}, at::TensorOptions(at::kLong).device(device));
  if (group->rank() == 0) {
    for (int peer = 1; peer < group->size(); ++peer) {
      const int global = group->global_rank(peer);
      for (int i = 0; i < kRoundTrips; ++i) {
        recv(message, global, options);
        // On a GPU the message may still be on its way.
        if (!device.is_cpu()) (void)message.item<int64_t>();
        message.fill_(clock());
        send(message, global, options);
      }
    }
    return {};
  }
  const int first = group->global_rank(0);
  ClockOffset best{.offset_ns = 0,
                   .uncertainty_ns = std::numeric_limits<int64_t>::max()};
  for (int i = 0; i < kRoundTrips; ++i) {
    const int64_t asked = clock();
    send(message, first, options);
    recv(message, first, options);
    const auto answer = message.item<int64_t>();
    const int64_t answered = clock();
    // Rounded up, so that the bound holds.
    const int64_t uncertainty = (answered - asked + 1) / 2;
    if (uncertainty >= best.uncertainty_ns) continue;
    best = {.offset_ns = answer - (asked + (answered - asked) / 2),
            .uncertainty_ns = uncertainty};
  }
  return best;
}

}  // namespace lockstep::internal
