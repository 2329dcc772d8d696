#pragma once

#include <cstddef>
#include <string>

namespace lockstep::internal {

// Returns `count` random hexadecimal digits, for names and secrets that nobody
// can guess. `count`: even, at most 512. Throws std::system_error if the system
// has none.
std::string random_digits(size_t count);

}  // namespace lockstep::internal
