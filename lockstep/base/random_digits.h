#pragma once

#include <string>

namespace lockstep::internal {

// Returns eight random hexadecimal digits, for names that nobody can guess.
// Throws std::system_error if the system has none.
std::string random_digits();

}  // namespace lockstep::internal
