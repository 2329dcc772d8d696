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

// Throws std::system_error with errno and the text "<what>: <the system's
// words>".
[[noreturn]] void throw_errno(const std::string& what);

}  // namespace lockstep::internal
