#pragma once

#include <stdexcept>
#include <string>

namespace lockstep {

// Thrown for a snapshot file that cannot be used: damaged, cut short, of
// another kind, or not the same on all ranks. what() is one line: which file,
// what is wrong with it, what to do. (A file that cannot be opened or written
// is a std::system_error; a file that belongs to another model is a
// std::invalid_argument.)
class SnapshotError : public std::runtime_error {
 public:
  // `problem` ends what() unless `advice` follows it.
  SnapshotError(const std::string& path, const std::string& problem,
                const std::string& advice =
                    "restore the file from a copy, or move it away to start "
                    "from the beginning")
      : std::runtime_error("snapshot \"" + path + "\" " + problem +
                           (advice.empty() ? "" : "; " + advice)) {}
};

}  // namespace lockstep
