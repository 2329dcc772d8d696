#include "lockstep/base/whole_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

// Reads until the end of the file, `most` bytes at most.
std::optional<std::string> read_all(const FileDescriptor& file, size_t most) {
  constexpr size_t kBytesAtOnce = 64 << 10;
  std::string bytes;
  while (bytes.size() < most) {
    const size_t before = bytes.size();
    bytes.resize(std::min(most, before + kBytesAtOnce));
    const ssize_t count =
        ::read(file.get(), bytes.data() + before, bytes.size() - before);
    bytes.resize(before + static_cast<size_t>(std::max<ssize_t>(count, 0)));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return std::nullopt;
    if (count == 0) break;
  }
  return bytes;
}

}  // namespace

FileDescriptor open_left_file(const fs::path& folder, const fs::path& name) {
  FileDescriptor at(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  for (auto part = name.begin(); at && part != name.end();) {
    const std::string one = *part;
    if (one.empty() || one == ".." || one.starts_with('/')) {
      errno = EINVAL;
      return {};
    }
    const bool is_last = ++part == name.end();
    // A pipe and a device are opened, too, but nothing waits for them.
    constexpr int kEach = O_RDONLY | O_NOFOLLOW | O_CLOEXEC;
    at = FileDescriptor(
        ::openat(at.get(), one.c_str(),
                 kEach | (is_last ? O_NONBLOCK | O_NOCTTY : O_DIRECTORY)));
  }
  struct stat facts {};
  if (at && (::fstat(at.get(), &facts) != 0 || !S_ISREG(facts.st_mode))) {
    at.reset();
    errno = EINVAL;
  }
  return at;
}

std::optional<std::string> read_left_file(const fs::path& folder,
                                          const fs::path& name, size_t most) {
  const FileDescriptor file = open_left_file(folder, name);
  if (!file) return std::nullopt;
  return read_all(file, most);
}

std::optional<std::string> read_end_of_left_file(const fs::path& folder,
                                                 const fs::path& name,
                                                 size_t most) {
  const FileDescriptor file = open_left_file(folder, name);
  if (!file) return std::nullopt;
  const off_t size = ::lseek(file.get(), 0, SEEK_END);
  if (size < 0) return std::nullopt;
  ::lseek(file.get(), std::max<off_t>(0, size - static_cast<off_t>(most)),
          SEEK_SET);
  return read_all(file, most);
}

FileDescriptor make_own_file(const fs::path& path, int flags) {
  ::unlink(path.c_str());
  constexpr int kNew = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  return FileDescriptor(::open(path.c_str(), kNew | flags, 0644));
}

bool write_own_file(const fs::path& path, std::string_view text) {
  const FileDescriptor file = make_own_file(path);
  while (file && !text.empty()) {
    const ssize_t count = ::write(file.get(), text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    text.remove_prefix(static_cast<size_t>(count));
  }
  if (file && !text.empty()) ::unlink(path.c_str());
  return file && text.empty();
}

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
