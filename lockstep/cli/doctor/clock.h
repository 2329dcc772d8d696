#pragma once

#include <cstdint>
#include <optional>

#include "lockstep/cli/doctor/finding.h"

namespace lockstep::internal {

// The kernel's view of its clock (adjtimex(2)).
struct ClockState {
  bool synchronised = false;
  int64_t most_error_us = 0;  // how wrong it may be
};

// Returns nothing if a sandbox does not let this process ask.
std::optional<ClockState> read_clock();

// Whether the clock of this host follows that of others.
Finding check_clock(const std::optional<ClockState>& clock);

}  // namespace lockstep::internal
