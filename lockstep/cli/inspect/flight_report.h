#pragma once

#include <string>

#include "lockstep/cli/inspect/flight_comparison.h"

// How a comparison is shown. Both end with a newline.
namespace lockstep {

// For the eye: what was found in each group, and a row a rank.
std::string flight_table(const FlightComparison& comparison);

// For programs; docs/flight-recorder.md has the fields.
std::string flight_json(const FlightComparison& comparison);

}  // namespace lockstep
