#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "lockstep/base/file_descriptor.h"

namespace lockstep {

// What a spawned process has to say to the one that started it: how far it
// came, and the exception that left fn. It lies in a file without a name
// (memfd), which the process inherits: writing never blocks, nobody must read
// meanwhile, and what was written outlives the writer's death.
//
//   int64  state, int64  nanoseconds of the steady clock, then text
//
// One process writes; the other may read at any time. Not synchronised within
// a process.
class SpawnReport {
 public:
  enum class State : int64_t {
    starting,    // has not reached the call
    reached,     // fn runs
    returned,    // fn has returned
    threw,       // an exception left fn: text
    lost_peers,  // one of communication, mostly the echo of a peer's end: text
    astray,      // came to another call instead: text
  };
  // What is kept of a text.
  static constexpr size_t kLongestText = 32 * 1024;

  // The starting side. Throws std::system_error.
  static SpawnReport create();
  // The spawned side: takes over the inherited descriptor `fd`, the file of
  // which is `inode`. Throws std::runtime_error where the program has closed it
  // meanwhile: another file may stand there now.
  static SpawnReport inherit(int fd, ino_t inode);

  // Close-on-exec, above 2.
  int fd() const { return fd_.get(); }
  ino_t inode() const;

  // Tells `state`. A report that cannot be written is lost: no error.
  void tell(State state, const std::string& text = {}) const;

  struct Told {
    State state = State::starting;
    std::chrono::nanoseconds when{};
  };
  Told told() const;
  std::string text() const;

 private:
  explicit SpawnReport(FileDescriptor fd) : fd_(std::move(fd)) {}

  FileDescriptor fd_;
};

// `fd` or a copy of it, above 2, where the standard streams of a spawned
// process will lie; close-on-exec. Throws std::system_error.
FileDescriptor above_standard_streams(FileDescriptor fd);

}  // namespace lockstep
