#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// The report of a spawned process to the process that started it: how far it
// came, and the exception that left fn. The report lies in a file without a
// name (memfd), which the spawned process inherits. So writing never blocks, no
// reader has to wait meanwhile, and the report outlives the process that
// wrote it.
//
//   int64  state, int64  nanoseconds of the steady clock, then text
//
// One process writes; the other may read at any time. Not synchronised within
// a process.
class SpawnReport {
 public:
  enum class State : int64_t {
    starting,  // has not reached the call
    reached,   // fn runs
    returned,  // fn has returned
    // The states below have a text.
    threw,  // an exception left fn
    // An exception of communication left fn, or fn caught one and then called
    // std::exit() with a code that says failure: mostly the echo of a peer's
    // end.
    lost_peers,
    astray,  // came to another call instead
  };
  // Longer texts are cut to this many bytes.
  static constexpr size_t kLongestText = 32 * 1024;

  // Makes a report, in the process that starts another. Throws
  // std::system_error.
  static SpawnReport create();
  // Opens the report in the spawned process: takes over the inherited
  // descriptor `fd`, whose file is `inode`. Throws std::runtime_error if the
  // program has closed it meanwhile: another file may have this number now.
  static SpawnReport inherit(int fd, ino_t inode);

  // Close-on-exec, above 2.
  int fd() const { return fd_.get(); }
  ino_t inode() const;

  // Writes `state` and `text`. A report that cannot be written is lost; that is
  // not an error.
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

}  // namespace lockstep::internal
