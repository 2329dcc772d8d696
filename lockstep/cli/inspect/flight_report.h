#pragma once

#include <string>

#include "lockstep/cli/inspect/flight_comparison.h"

// The texts that show a comparison. Both end with a newline.
namespace lockstep::internal {

// Returns a table for people: what was found in each group, and a row for each
// rank.
std::string flight_table(const FlightComparison& comparison);

// Returns JSON for programs; docs/flight-recorder.md has the fields.
std::string flight_json(const FlightComparison& comparison);

}  // namespace lockstep::internal
