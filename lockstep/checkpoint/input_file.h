#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

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
  int descriptor() const { return fd_.get(); }

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
