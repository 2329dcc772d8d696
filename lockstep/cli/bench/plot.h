#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace lockstep::bench {

// The JSON's "results" as a picture (SVG 1.1, alone in a file, drawn by any
// browser): median latency over bytes, both axes logarithmic, a panel for each
// operation, dtype and world, a line for each side, and in it a point for each
// size that it has figures of. Operations without data are left out.
std::string plot(const nlohmann::ordered_json& machine,
                 const nlohmann::ordered_json& results);

}  // namespace lockstep::bench
