#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// Replaces a file as a whole: at every moment, even after a SIGKILL or a power
// failure, its path holds either the old content or the new.
//
// The new content is written to a temporary file in the same directory, named
// ".NAME.lockstep-XXXXXXXXXXXXXXXX.tmp" (16 random hexadecimal digits). That
// file is synchronised to the disk and then renamed to NAME; the directory is
// synchronised last. A killed process leaves its temporary file behind. A
// writer holds a lock (flock) on its file as long as it lives, so the next save
// of the same NAME can tell which files are left over, and removes them.
//
// A symbolic link at the path stays; the file that it points to is replaced.
// The new file gets the permissions of the old one.
class AtomicFile {
 public:
  // Throws std::system_error that names the path and the cause, and
  // std::invalid_argument if the path holds something that is not a regular
  // file.
  explicit AtomicFile(const std::string& path);

  // Removes the temporary file unless commit() has succeeded.
  ~AtomicFile();

  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Appends `size` bytes. Throws std::system_error (for a full disk: ENOSPC).
  void write(const void* data, size_t size);

  // Blocks until the content and its name are on the disk. Throws
  // std::system_error; the old file is then unchanged. The exception is a
  // failure of the very last step, synchronising the directory: then the new
  // file exists and is complete, but may not survive a power failure.
  void commit();

 private:
  [[noreturn]] void fail(const std::string& step) const;
  void open_aside();
  void remove_left_overs() const;

  std::string path_;       // as given, for messages
  std::string directory_;  // of the real file, with links resolved
  std::string name_;
  std::string aside_;  // full path; empty after it was renamed or removed
  FileDescriptor fd_;
};

// Throws an error with the path and the cause unless AtomicFile(path) can make
// its temporary file; leaves no file behind. Callers use it to find out before
// hours of training, not after them, that a folder is missing.
void check_can_save(const std::string& path);

// Returns whether `name` (without a directory) is a name that AtomicFile gives
// to a temporary file of `target`.
bool is_aside_name(const std::string& name, const std::string& target);

// Returns a new name of that kind.
std::string aside_name(const std::string& target);

// A regular file, open for reading at any offset. Its size is taken once, when
// it is opened; a save that replaces the path later does not disturb the reader
// (the old file lives until it is closed). Any thread may read; reading blocks
// on the disk.
class InputFile {
 public:
  // Throws std::system_error that names `path` if the file cannot be opened,
  // and SnapshotError if it is not a regular file.
  explicit InputFile(const std::string& path);

  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }
  int descriptor() const { return fd_.get(); }  // -1 after close()

  // Nothing can be read afterwards; path() and size() stay.
  void close() { fd_.reset(); }

  // Reads exactly `size` bytes from `offset` on. Throws SnapshotError if the
  // file ends before, std::system_error if the disk fails.
  void read_at(uint64_t offset, void* to, size_t size) const;

  // Reads the same bytes into a string.
  std::string read_text(uint64_t offset, size_t size) const;

 private:
  std::string path_;
  FileDescriptor fd_;
  uint64_t size_ = 0;
};

}  // namespace lockstep::internal
