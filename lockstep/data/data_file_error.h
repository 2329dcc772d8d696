#pragma once

#include <stdexcept>
#include <string>

namespace lockstep {

// Thrown for a file of a dataset that cannot be used: damaged, cut short, or of
// another format. what() is one line: which file, which place in it (a line, a
// row or a byte), what was found there and what is allowed. (A file that cannot
// be opened or mapped is a std::system_error.)
class DataFileError : public std::runtime_error {
 public:
  DataFileError(const std::string& path, const std::string& problem)
      : std::runtime_error("data file \"" + path + "\" " + problem) {}
};

}  // namespace lockstep
