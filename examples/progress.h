#pragma once

#include <chrono>
#include <cstdint>

namespace examples {

// Shows a person how far a training is: on a terminal a bar with loss,
// samples/s and the time that is left, anywhere else one line per epoch. It
// prints to standard output. Only the rank that prints makes one, and uses it
// from one thread.
class Progress {
 public:
  // `total_steps` is the whole training; steps before `first_step` ran earlier.
  Progress(int64_t total_steps, int64_t first_step, int64_t samples_per_step);

  // Call it after step `step` (counted from 1).
  void step(int64_t step, double loss);
  void epoch(int64_t epoch, int64_t step, double loss, double accuracy);

 private:
  using Clock = std::chrono::steady_clock;
  double samples_per_second(int64_t step) const;

  int64_t total_steps_;
  int64_t first_step_;
  int64_t samples_per_step_;
  bool terminal_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point shown_{};
};

}  // namespace examples
