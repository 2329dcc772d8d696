#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace lockstep::internal::bench {

// Draws the JSON's "results" as SVG 1.1, a whole file that any browser shows:
// median latency over bytes, both axes logarithmic. There is a panel for each
// operation, dtype and world, in it a line for each side, and on that a point
// for each size of which the side has figures. Operations without data are left
// out.
std::string plot(const nlohmann::ordered_json& machine,
                 const nlohmann::ordered_json& results);

}  // namespace lockstep::internal::bench
