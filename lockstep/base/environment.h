#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::internal {

// Returns the value of environment variable `name`, or nothing if it is unset
// or empty (Python's rendezvous treats the two alike). Not safe if another
// thread calls setenv() at the same time.
std::optional<std::string> get_env(const char* name);

// Returns the same as an integer in [lowest, highest]. If the variable is set
// to anything else, throws std::invalid_argument that names the variable, its
// value and the range.
std::optional<int64_t> get_env_int(const char* name, int64_t lowest,
                                   int64_t highest);

// Returns `text` as a decimal integer in [lowest, highest]. If `text` as a
// whole is not such an integer, throws std::invalid_argument whose text begins
// with `what` ("--nproc-per-node").
int64_t parse_int(std::string_view what, std::string_view text, int64_t lowest,
                  int64_t highest);

// Returns the name that gethostname() gives to this machine; "localhost" if it
// has none.
std::string host_name();

}  // namespace lockstep::internal
