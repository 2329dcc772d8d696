#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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

// The content of a file from its beginning to its end, decompressed if the file
// is compressed. Belongs to one thread.
class ByteReader {
 public:
  virtual ~ByteReader() = default;

  // Fills `to` (not empty) as far as there is content, and returns the number
  // of bytes; less than asked for only at the end. Throws DataFileError if the
  // compressed data are damaged or cut short.
  virtual size_t read(std::span<uint8_t> to) = 0;

  // Returns a bound for the size of the whole content, which costs nothing to
  // compute. A size that a header claims is compared with it before memory is
  // allocated.
  virtual uint64_t most_bytes() const = 0;
};

// Returns a reader for a plain file or a gzip file (RFC 1952, one or several
// members, and zeros after the last), which its first two bytes tell apart; the
// name does not matter.
// `file` must outlive the reader.
std::unique_ptr<ByteReader> open_bytes(const MappedFile& file);

// Returns whether `bytes` begin as a gzip file does.
bool is_gzip(Bytes bytes);

}  // namespace lockstep::internal
