#include "lockstep/checkpoint/sharded/save_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

namespace lockstep::internal {
namespace {

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  throw_errno("\"" + path + "\" " + what);
}

}  // namespace

void SaveFiles::make_folder(const std::string& path) {
  before("mkdir", path);
  if (::mkdir(path.c_str(), 0777) != 0) fail("cannot be made", path);
}

FileDescriptor SaveFiles::open_lock(const std::string& path) {
  before("open", path);
  FileDescriptor file(
      ::open(path.c_str(),
             O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666));
  if (!file) fail("cannot be opened", path);
  return file;
}

FileDescriptor SaveFiles::create(const std::string& path) {
  before("open", path);
  FileDescriptor file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file) fail("cannot be made", path);
  return file;
}

void SaveFiles::write_at(const FileDescriptor& file, const std::string& path,
                         uint64_t offset, const void* data, size_t size) {
  // Less than what Linux writes at once, 2 GiB, so that before() is called
  // several times a second.
  constexpr size_t kMostAtOnce = size_t{64} << 20;
  const auto* from = static_cast<const char*>(data);
  while (size > 0) {
    before("write", path);
    const ssize_t put = ::pwrite(file.get(), from, std::min(size, kMostAtOnce),
                                 static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("cannot be written", path);
    bytes_written_ += static_cast<uint64_t>(put);
    from += put;
    offset += static_cast<uint64_t>(put);
    size -= static_cast<size_t>(put);
  }
}

void SaveFiles::sync(const FileDescriptor& file, const std::string& path) {
  before("fsync", path);
  if (::fsync(file.get()) != 0) fail("cannot be written", path);
}

void SaveFiles::sync_folder(const std::string& path) {
  before("fsync", path);
  const FileDescriptor folder(
      ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: the file system's folders need no fsync.
  if (!folder || (::fsync(folder.get()) != 0 && errno != EINVAL)) {
    fail("cannot be synchronised", path);
  }
}

void SaveFiles::rename(const std::string& from, const std::string& to) {
  before("rename", to);
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail("cannot be renamed to \"" + to + "\"", from);
  }
}

void SaveFiles::link(const std::string& target, const std::string& path) {
  before("symlink", path);
  if (::symlink(target.c_str(), path.c_str()) != 0) {
    fail("cannot be made", path);
  }
}

void SaveFiles::remove_file(const std::string& path) {
  before("unlink", path);
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    fail("cannot be removed", path);
  }
}

void SaveFiles::remove_folder(const std::string& path) {
  before("rmdir", path);
  if (::rmdir(path.c_str()) != 0 && errno != ENOENT) {
    fail("cannot be removed", path);
  }
}

}  // namespace lockstep::internal
