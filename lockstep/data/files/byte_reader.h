#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "lockstep/data/files/mapped_file.h"

namespace lockstep::internal {

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
