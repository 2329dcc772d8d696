#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace lockstep::internal {

using Bytes = std::span<const uint8_t>;

// A regular file, mapped for reading: its pages are read from the disk when
// they are first used, and the system may drop them again. Its size is taken
// once, when it is opened. A program that replaces the file by renaming another
// one does not disturb the mapping. A program that *shortens* the file does: an
// access past its new end kills the process (SIGBUS), as it does with every
// mapping, numpy.memmap's included.
//
// Any thread may read. Not copyable; datasets share one by a std::shared_ptr.
class MappedFile {
 public:
  // Throws std::system_error that names `path` if the file cannot be opened or
  // mapped, and DataFileError if it is not a regular file.
  explicit MappedFile(const std::string& path);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  Bytes bytes() const { return {data_, size_}; }

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace lockstep::internal
