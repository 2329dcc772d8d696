#include "lockstep/checkpoint/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "lockstep/checkpoint/snapshot_error.h"

namespace lockstep::internal {

InputFile::InputFile(const std::string& path) : path_(path) {
  // O_NONBLOCK, because opening a pipe would otherwise wait for a writer.
  fd_ = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd_) throw_errno("snapshot \"" + path + "\" cannot be opened");
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) {
    throw_errno("snapshot \"" + path + "\" cannot be read");
  }
  if (!S_ISREG(status.st_mode)) {
    throw SnapshotError(
        path,
        S_ISDIR(status.st_mode) ? "is a directory" : "is not a regular file",
        "name the file that holds the snapshot");
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

void InputFile::read_at(uint64_t offset, void* to, size_t size) const {
  // Linux reads at most 2 GiB at once.
  constexpr size_t kMostAtOnce = size_t{1} << 30;
  auto* out = static_cast<char*>(to);
  while (size > 0) {
    const ssize_t got = ::pread(fd_.get(), out, std::min(size, kMostAtOnce),
                                static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno("snapshot \"" + path_ + "\" cannot be read");
    if (got == 0) {
      throw SnapshotError(path_, "ends before byte " +
                                     std::to_string(offset + size) +
                                     ": it was cut short");
    }
    out += got;
    offset += static_cast<uint64_t>(got);
    size -= static_cast<size_t>(got);
  }
}

std::string InputFile::read_text(uint64_t offset, size_t size) const {
  std::string text(size, '\0');
  read_at(offset, text.data(), size);
  return text;
}

}  // namespace lockstep::internal
