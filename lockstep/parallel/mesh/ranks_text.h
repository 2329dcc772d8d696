#pragma once

#include <string>
#include <vector>

namespace lockstep::internal {

// Returns "{0, 4}"; of more than eight ranks only the first and the last, with
// their number: "{0, 8, 16, ..., 1016} (128 ranks)".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace lockstep::internal
