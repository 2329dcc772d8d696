#pragma once

#include <cstddef>
#include <string>

namespace lockstep::internal {

// A connection to the agents' store that is ready for messages: hands are
// shaken, and the hello was answered. For one thread. No call blocks.
class StoreLine {
 public:
  enum class Progress {
    done,
    wants_input,   // call again when fd() is readable
    wants_output,  // call again when fd() is writable
    closed,        // by the other side, or broken
  };

  virtual ~StoreLine() = default;
  virtual int fd() const = 0;
  // Reads up to `most` bytes and appends them to `bytes`.
  virtual Progress read(std::string& bytes, size_t most) = 0;
  // Removes from `bytes` what was written; `done`: all was.
  virtual Progress write(std::string& bytes) = 0;
};

}  // namespace lockstep::internal
