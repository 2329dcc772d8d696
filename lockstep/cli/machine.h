#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace lockstep::internal {

// Returns the number of processors that this process may run on.
int cores();

// Returns what a reader of measurements wants to know of this machine: "cores"
// (cores()), "cpu", "system", and "load_before", the load of the last minute.
nlohmann::ordered_json machine_facts();

// Returns the time of now as "2026-11-21T03:14:45+00:00".
std::string utc_date();

}  // namespace lockstep::internal
