#pragma once

#include <chrono>
#include <cstdint>

#include "lockstep/parallel/ddp/logging_data.h"

namespace lockstep::internal {

// Takes the times of DDPLoggingData: in each of the first 10 iterations, then
// in one of `sample_rate`. An iteration that is not sampled reads no clock. One
// thread at a time (the reducer's lock guards it); no call blocks.
class DdpTimes {
 public:
  using Clock = std::chrono::steady_clock;

  void set_sample_rate(int64_t rate) { sample_rate_ = rate; }
  void forward_begins() {
    sampled_ = iteration_ < kFirstIterations || iteration_ % sample_rate_ == 0;
    if (sampled_) forward_begin_ = Clock::now();
  }
  void backward_begins() {
    if (sampled_) backward_begin_ = Clock::now();
    published_ = false;
  }
  void bucket_published() {
    if (sampled_ && !published_) comm_begin_ = Clock::now();
    published_ = true;
  }
  void last_gradient() {
    if (sampled_) last_gradient_ = Clock::now();
  }
  void backward_ended();
  void describe(DDPLoggingData& data) const;
  int64_t iteration() const { return iteration_; }

 private:
  static constexpr int64_t kFirstIterations = 10;
  struct Durations {
    int64_t forward = 0, backward = 0, comm = 0, overlap = 0;
  };
  int64_t sample_rate_ = 100;
  int64_t iteration_ = 0;
  int64_t samples_ = 0;
  bool sampled_ = false;
  bool published_ = false;
  Clock::time_point forward_begin_{}, backward_begin_{}, comm_begin_{},
      last_gradient_{};
  Durations last_{};
  Durations sums_{};
};

}  // namespace lockstep::internal
