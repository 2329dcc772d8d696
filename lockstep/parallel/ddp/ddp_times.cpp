#include "lockstep/parallel/ddp/ddp_times.h"

#include <algorithm>

namespace lockstep::internal {
namespace {

int64_t nanoseconds(DdpTimes::Clock::time_point begin,
                    DdpTimes::Clock::time_point end) {
  const auto time = std::chrono::nanoseconds(end - begin).count();
  return std::max<int64_t>(time, 0);
}

}  // namespace

void DdpTimes::backward_ended() {
  ++iteration_;
  if (!sampled_) return;
  sampled_ = false;
  const auto now = Clock::now();
  last_ = {
      .forward = nanoseconds(forward_begin_, backward_begin_),
      .backward = nanoseconds(backward_begin_, last_gradient_),
      .comm = published_ ? nanoseconds(comm_begin_, now) : 0,
      .overlap = published_ ? nanoseconds(comm_begin_, last_gradient_) : 0};
  ++samples_;
  sums_.forward += last_.forward;
  sums_.backward += last_.backward;
  sums_.comm += last_.comm;
  sums_.overlap += last_.overlap;
}

void DdpTimes::describe(DDPLoggingData& data) const {
  data.forward_compute_time = last_.forward;
  data.backward_compute_time = last_.backward;
  data.backward_comm_time = last_.comm;
  data.backward_compute_comm_overlap_time = last_.overlap;
  if (samples_ == 0) return;
  data.avg_forward_compute_time = sums_.forward / samples_;
  data.avg_backward_compute_time = sums_.backward / samples_;
  data.avg_backward_comm_time = sums_.comm / samples_;
  data.avg_backward_compute_comm_overlap_time = sums_.overlap / samples_;
}

}  // namespace lockstep::internal
