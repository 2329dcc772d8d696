#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// The longest interval. A longer one could overflow the clock.
inline constexpr std::chrono::seconds kLongestInterval =
    std::chrono::hours(24 * 365);

struct BackgroundFilesOptions {
  // The thread writes when this many records wait, or when the oldest one has
  // waited for `interval`.
  size_t most_records{10};
  std::chrono::milliseconds interval{std::chrono::seconds(120)};
  // How many bytes of records may wait (one larger record is accepted, too).
  size_t most_bytes{64 << 20};
};

// Files to which a thread of this object appends records, so that the thread
// that makes them does not wait for the disk.
//
// The disk may fail, for example because it is full. The records that were not
// written then stay in memory, up to `most_bytes`, and the thread tries again
// when `interval` has passed; records beyond that are dropped. What is in a
// file is always a number of whole records: a part that was written is cut off
// again.
//
// After flush() the records are with the operating system: they survive the end
// of the process, by SIGKILL too, but not a power failure. What was appended
// since is lost if the process ends without close() or the destructor.
//
// All functions may be called from any thread. In a child process that was
// forked later, they throw std::runtime_error, and the destructor does nothing.
class BackgroundFiles {
 public:
  // Throws std::system_error if the system has no more threads.
  explicit BackgroundFiles(const BackgroundFilesOptions& options);
  // As close(), without the error.
  ~BackgroundFiles();
  BackgroundFiles(const BackgroundFiles&) = delete;
  BackgroundFiles& operator=(const BackgroundFiles&) = delete;

  // Takes a file that is open for appending, and returns its number. `path` is
  // for messages. Throws std::system_error if the file's size is not known.
  size_t add(FileDescriptor file, std::string path);

  // Copies the record. Blocks only if `most_bytes` wait already, until the disk
  // has taken some. Throws std::logic_error after close().
  void append(size_t file, std::string_view record);

  // Blocks until everything that was appended before is written. Throws
  // std::system_error that names the file if that is not possible.
  void flush();

  // Writes what waits, and ends the thread. The second call does nothing.
  // Throws as flush() does; what was not written is lost then.
  void close();

  // Returns one line about a failure of the thread that no exception has told
  // and no earlier call has returned; "" if there is none. It is cheap.
  std::string take_notice();

  // The bytes that wait, and whether the thread could not write them and tries
  // again.
  struct Backlog {
    size_t bytes;
    bool failed;
  };
  Backlog backlog() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::internal
