#include "lockstep/cli/doctor/clock.h"

#include <sys/timex.h>

#include <cstdio>

namespace lockstep::internal {
namespace {

// Larger than this, and an operation of one host seems to end on another before
// it has begun.
constexpr int64_t kLargeError = 100'000;

std::string milliseconds_text(int64_t microseconds) {
  char text[48];
  std::snprintf(text, sizeof text, "%.3g ms",
                static_cast<double>(microseconds) / 1000);
  return text;
}

}  // namespace

std::optional<ClockState> read_clock() {
  timex state{};
  const int result = ::adjtimex(&state);  // modes 0: changes nothing
  if (result < 0) return std::nullopt;
  return ClockState{
      .synchronised = result != TIME_ERROR && (state.status & STA_UNSYNC) == 0,
      .most_error_us = state.maxerror};
}

Finding check_clock(const std::optional<ClockState>& clock) {
  Finding finding{.name = "clock"};
  if (!clock) {
    finding.found = "the system does not tell how exact it is";
    return finding;
  }
  finding.values = {{"synchronised", clock->synchronised},
                    {"most_error_us", clock->most_error_us}};
  const std::string remedy =
      "Times in logs of several hosts cannot be compared. Run chrony or "
      "systemd-timesyncd, on the host if this is a container or a virtual "
      "machine.";
  if (!clock->synchronised) {
    finding.found = "nothing synchronises it";
    finding.warn(remedy);
    return finding;
  }
  finding.found = "synchronised, wrong by " +
                  milliseconds_text(clock->most_error_us) + " at most";
  if (clock->most_error_us > kLargeError) finding.warn(remedy);
  return finding;
}

}  // namespace lockstep::internal
