#include "lockstep/checkpoint/disk_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "lockstep/base/environment.h"
#include "lockstep/checkpoint/snapshot_error.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kInfix = ".lockstep-";
constexpr const char* kSuffix = ".tmp";
constexpr size_t kDigits = 16;
constexpr int kMostLinks = 40;  // as in Linux

// Returns the file that writing to `path` replaces: the target of a link, which
// need not exist.
fs::path target_of(const std::string& path) {
  std::error_code error;
  fs::path target = path;
  int links = 0;
  while (fs::is_symlink(fs::symlink_status(target, error))) {
    const fs::path next = fs::read_symlink(target, error);
    if (++links > kMostLinks) {
      error = std::make_error_code(std::errc::too_many_symbolic_link_levels);
    }
    if (error) {
      throw std::system_error(
          error,
          "snapshot \"" + path +
              "\" cannot be saved: its symbolic link cannot be followed");
    }
    target = target.parent_path() / next;  // `next` alone if it is absolute
  }
  const fs::file_type type = fs::status(target, error).type();
  if (type != fs::file_type::regular && type != fs::file_type::not_found &&
      type != fs::file_type::none) {
    throw std::invalid_argument(
        "snapshot \"" + path + "\" cannot be saved: " +
        (type == fs::file_type::directory
             ? "a directory"
             : "something that is not a regular file") +
        " has that name; name another file, or end the path with "
        "\"/\" for a folder of snapshots");
  }
  if (!target.has_filename()) {
    throw std::invalid_argument(
        "snapshot \"" + path +
        "\" cannot be saved: the path does not name a file");
  }
  return target;
}

}  // namespace

bool is_aside_name(const std::string& name, const std::string& target) {
  const std::string head = "." + target + kInfix;
  const std::string tail = kSuffix;
  if (name.size() != head.size() + kDigits + tail.size() ||
      !name.starts_with(head) || !name.ends_with(tail)) {
    return false;
  }
  return std::all_of(
      name.begin() + static_cast<ptrdiff_t>(head.size()),
      name.end() - static_cast<ptrdiff_t>(tail.size()),
      [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

std::string aside_name(const std::string& target) {
  return "." + target + kInfix + random_digits(kDigits) + kSuffix;
}

void check_can_save(const std::string& path) {
  try {
    const AtomicFile tried(path);
  } catch (const std::system_error& error) {
    const std::string folder = fs::path(path).parent_path().string();
    throw std::system_error(
        error.code(),
        "no snapshot can be saved as \"" + path + "\"; make the folder \"" +
            (folder.empty() ? "." : folder) +
            "\" and let rank 0 write there, name another path, or, in a run "
            "that only reads, set LoadSnapshotOptions::will_save to false");
  }
}

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  const fs::path target = target_of(path);
  directory_ = target.has_parent_path() ? target.parent_path().string() : ".";
  name_ = target.filename().string();
  remove_left_overs();
  open_aside();
  struct stat old {};
  if (::stat((directory_ + "/" + name_).c_str(), &old) == 0) {
    // The old mode cannot be set if the old file belongs to another user; that
    // is not a reason to refuse the save.
    (void)::fchmod(fd_.get(), old.st_mode & 07777);
  }
}

AtomicFile::~AtomicFile() {
  if (!aside_.empty()) ::unlink(aside_.c_str());
}

void AtomicFile::fail(const std::string& step) const {
  throw_errno("snapshot \"" + path_ + "\" was not saved: " + step);
}

void AtomicFile::open_aside() {
  for (;;) {
    aside_ = directory_ + "/" + aside_name(name_);
    fd_ = FileDescriptor(
        ::open(aside_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!fd_) {
      const int cause = errno;
      aside_.clear();
      errno = cause;
      if (errno == EEXIST) continue;
      fail("a file cannot be made in \"" + directory_ + "\"");
    }
    // Between open() and flock() another job's save may take the file for left
    // over; then a new one is made. That save may have the lock, and is about
    // to remove the file, or have removed it already. If the file system has no
    // locks, files that killed processes left behind stay; nothing else is
    // lost.
    if (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      continue;
    }
    struct stat status {};
    if (::fstat(fd_.get(), &status) == 0 && status.st_nlink > 0) return;
  }
}

void AtomicFile::remove_left_overs() const {
  std::error_code error;
  for (fs::directory_iterator it(directory_, error), end; !error && it != end;
       it.increment(error)) {
    if (!is_aside_name(it->path().filename().string(), name_)) continue;
    const FileDescriptor left(::open(
        it->path().c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    // NFS locks files that are open for writing only. If the lock is held, the
    // save of that file is still running.
    if (left && ::flock(left.get(), LOCK_EX | LOCK_NB) == 0) {
      ::unlink(it->path().c_str());
    }
  }
}

void AtomicFile::write(const void* data, size_t size) {
  constexpr size_t kMostAtOnce = size_t{1} << 30;
  const auto* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t put = ::write(fd_.get(), from, std::min(size, kMostAtOnce));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("it cannot be written");
    from += put;
    size -= static_cast<size_t>(put);
  }
}

void AtomicFile::commit() {
  if (::fsync(fd_.get()) != 0) fail("it cannot be written");
  const std::string target = directory_ + "/" + name_;
  if (::rename(aside_.c_str(), target.c_str()) != 0) {
    fail("it cannot be renamed to \"" + name_ + "\"");
  }
  aside_.clear();
  const FileDescriptor directory(
      ::open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: the file system's directories need no fsync.
  if (!directory || (::fsync(directory.get()) != 0 && errno != EINVAL)) {
    throw_errno("snapshot \"" + path_ +
                "\" was saved, but may not survive a power failure: its "
                "directory cannot be synchronised");
  }
}

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
