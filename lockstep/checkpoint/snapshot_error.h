#pragma once

#include <stdexcept>
#include <string>

namespace lockstep {

// A snapshot file that cannot be used: damaged, cut short, of another kind, or
// not the same on all ranks. what() is one line: which file, what is wrong
// with it, what to do. (That a file cannot be opened or written is a
// std::system_error; that it belongs to another model, std::invalid_argument.)
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
