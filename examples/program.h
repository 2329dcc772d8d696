#pragma once

#include <functional>

namespace examples {

// The main() of an example: runs `body` and turns what it throws into one line
// on standard error, with the rank where there is one, and exit code 1.
int run_program(const char* name, const std::function<void()>& body);

}  // namespace examples
