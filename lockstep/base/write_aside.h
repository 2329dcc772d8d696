#pragma once

#include <string>
#include <string_view>

namespace lockstep::internal {

// Returns whether a new file must not take the place of what is at `path`: a
// pipe, a device, or the file that is this process's stdout. A link to itself
// is so, too, and then cannot be opened.
bool is_written_through(const std::string& path);

// Writes a new file under a random name in the same folder and then renames it,
// so that no reader sees a part of it. Only this user may read it if
// `is_private`. What is_written_through() is written as it is; a pipe without a
// reader is ENXIO. Returns 0, or the errno of what failed; then nothing is
// left. Throws std::system_error if the system has no random numbers.
int write_aside(const std::string& path, std::string_view bytes,
                bool is_private = true);

}  // namespace lockstep::internal
