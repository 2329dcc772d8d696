#pragma once

#include <string>
#include <string_view>

namespace lockstep::internal {

// Writes a file under another name in the same folder and then renames it, so
// that no reader sees a part of it. Only this user may read a new file if
// `is_private`. Returns 0, or the errno of what failed; then nothing is left.
int write_aside(const std::string& path, std::string_view bytes,
                bool is_private = true);

}  // namespace lockstep::internal
