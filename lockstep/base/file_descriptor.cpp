#include "lockstep/base/file_descriptor.h"

#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace lockstep::internal {

void FileDescriptor::reset() {
  // Not repeated on EINTR: Linux has released the descriptor by then.
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace lockstep::internal
