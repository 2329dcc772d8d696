#include "lockstep/base/write_aside.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/random_digits.h"

namespace lockstep::internal {

bool is_written_through(const std::string& path) {
  struct stat there {};
  if (::stat(path.c_str(), &there) != 0) return errno == ELOOP;
  if (!S_ISREG(there.st_mode)) return true;
  struct stat out {};
  return ::fstat(STDOUT_FILENO, &out) == 0 && out.st_dev == there.st_dev &&
         out.st_ino == there.st_ino;
}

int write_aside(const std::string& path, std::string_view bytes,
                bool is_private) {
  const bool through = is_written_through(path);
  // Others may write in the folder: a name that they guess could be a link.
  const auto aside = through ? path : path + "." + random_digits(8);
  constexpr int kNew = O_CREAT | O_EXCL | O_NOFOLLOW;
  // A pipe that nobody reads is an error.
  constexpr int kThere = O_APPEND | O_NONBLOCK;
  FileDescriptor file(::open(aside.c_str(),
                             O_WRONLY | O_CLOEXEC | (through ? kThere : kNew),
                             is_private ? 0600 : 0644));
  if (!file) return errno;
  if (through) ::fcntl(file.get(), F_SETFL, O_APPEND);
  const auto fail = [&](int error) {
    if (!through) ::unlink(aside.c_str());
    return error;
  };
  while (!bytes.empty()) {
    const ssize_t count = ::write(file.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return fail(errno);
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  if (!through && ::rename(aside.c_str(), path.c_str()) != 0) {
    return fail(errno);
  }
  return 0;
}

}  // namespace lockstep::internal
