#include "examples/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

namespace examples {

Progress::Progress(int64_t total_steps, int64_t first_step,
                   int64_t samples_per_step)
    : total_steps_(total_steps),
      first_step_(first_step),
      samples_per_step_(samples_per_step),
      terminal_(::isatty(STDOUT_FILENO) == 1) {}

double Progress::samples_per_second(int64_t step) const {
  std::chrono::duration<double> passed = Clock::now() - start_;
  return static_cast<double>((step - first_step_) * samples_per_step_) /
         std::max(passed.count(), 1e-9);
}

void Progress::step(int64_t step, double loss) {
  auto now = Clock::now();
  if (!terminal_ || now - shown_ < std::chrono::milliseconds(100)) return;
  shown_ = now;
  constexpr int kWidth = 30;
  auto done =
      static_cast<int>(step * kWidth / std::max<int64_t>(total_steps_, 1));
  double rate = samples_per_second(step);
  double left =
      static_cast<double>((total_steps_ - step) * samples_per_step_) / rate;
  // \r and "erase to the end of the line", so that the bar stays one line.
  std::printf("\r[%s%s] %3d %%  loss %.4f  %.0f samples/s  ETA %.0f s\033[K",
              std::string(done, '#').c_str(),
              std::string(kWidth - done, '.').c_str(),
              static_cast<int>(step * 100 / std::max<int64_t>(total_steps_, 1)),
              loss, rate, left);
  std::fflush(stdout);
}

void Progress::epoch(int64_t epoch, int64_t step, double loss,
                     double accuracy) {
  std::printf(
      "%sEpoch %2ld | loss %.4f | test accuracy %.2f %% | %.0f samples/s\n",
      terminal_ ? "\r\033[K" : "", static_cast<long>(epoch), loss,
      100 * accuracy, samples_per_second(step));
  std::fflush(stdout);
}

}  // namespace examples
