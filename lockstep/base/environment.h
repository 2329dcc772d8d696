#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

// The value of environment variable `name`, or nothing where it is unset or
// empty (Python's rendezvous treats the two alike). Not safe against a
// concurrent setenv.
std::optional<std::string> get_env(const char* name);

// The same as an integer in [lowest, highest]. Throws std::invalid_argument
// that names the variable, its value and the range when it is set to anything
// else.
std::optional<int64_t> get_env_int(const char* name, int64_t lowest,
                                   int64_t highest);

// `text` as a decimal integer in [lowest, highest]; all of it must be used.
// Throws std::invalid_argument that begins with `what` ("--nproc-per-node").
int64_t parse_int(std::string_view what, std::string_view text, int64_t lowest,
                  int64_t highest);

}  // namespace lockstep
