#pragma once

#include <stdexcept>

namespace lockstep::internal {

// what() is one line: the file or folder, the place in it, what it has and what
// is allowed.
class TraceFileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace lockstep::internal
