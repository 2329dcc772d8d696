#include "lockstep/base/write_aside.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

int write_aside(const std::string& path, std::string_view bytes,
                bool is_private) {
  const auto aside = path + "." + std::to_string(::getpid());
  FileDescriptor file(::open(aside.c_str(),
                             O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC,
                             is_private ? 0600 : 0644));
  if (!file) return errno;
  const auto fail = [&aside](int error) {
    ::unlink(aside.c_str());
    return error;
  };
  while (!bytes.empty()) {
    const ssize_t count = ::write(file.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return fail(errno);
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  if (::rename(aside.c_str(), path.c_str()) != 0) return fail(errno);
  return 0;
}

}  // namespace lockstep::internal
