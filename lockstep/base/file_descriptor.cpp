#include "lockstep/base/file_descriptor.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace lockstep::internal {

void FileDescriptor::reset() {
  // Not repeated on EINTR: Linux has released the descriptor by then.
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

FileDescriptor open_terminal_of(int fd) {
  // The other end of a pseudoterminal passes for a terminal, too, but to open
  // its file makes another pair.
  unsigned number = 0;
  if (!::isatty(fd) || ::ioctl(fd, TIOCGPTN, &number) == 0) return {};
  // O_NONBLOCK belongs to what is opened here; `fd` shares its own flags with
  // the shell.
  const std::string file = "/proc/self/fd/" + std::to_string(fd);
  return FileDescriptor(
      ::open(file.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace lockstep::internal
