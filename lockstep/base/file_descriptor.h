#pragma once

#include <string>
#include <utility>

namespace lockstep::internal {

// Owns one file descriptor and closes it at the end of its life. Movable, not
// copyable; not synchronised.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() { reset(); }

  // Returns -1 if nothing is owned.
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset();

 private:
  int fd_ = -1;
};

// Returns a descriptor for writing to the terminal behind `fd` that never
// blocks, though `fd` itself may: a write takes what fits, or fails with
// EAGAIN. (poll() reports a terminal as writable if one byte fits, and a write
// that blocks then waits until the rest has been read, too.) Returns an empty
// descriptor if `fd` is not a terminal, or is one that this process may not
// open, such as that of another user.
FileDescriptor open_terminal_of(int fd);

// Throws std::system_error with errno and the text "<what>: <the system's
// words>".
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace lockstep::internal
