#pragma once

#include <string>
#include <string_view>

namespace lockstep::internal {

// Throws std::invalid_argument that begins with `what` ("add_scalar(): the
// tag") unless `name` is UTF-8, not empty, and has no control characters such
// as the end of a line.
void require_name(std::string_view what, const std::string& name);

// Throws std::invalid_argument that begins with `what` if `name`, as the name
// of a folder in another one, leads out of that: a part of it is "..". Slashes
// are allowed.
void require_inside(std::string_view what, const std::string& name);

// Throws std::invalid_argument that begins with `what` unless `text` is UTF-8.
void require_utf8(std::string_view what, const std::string& text);

// Returns `text` as a string of JSON, with its quotes. The text must be UTF-8.
std::string json_string(const std::string& text);

// Returns the rank that this process logs as: its rank in the default group if
// there is one, otherwise the one that the launcher's variable RANK gives it,
// otherwise 0.
int log_rank();
// Returns the number of ranks, found alike: of the default group, from
// WORLD_SIZE, or 1.
int log_world_size();

}  // namespace lockstep::internal
