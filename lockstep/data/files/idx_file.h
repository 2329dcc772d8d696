#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/data/files/byte_reader.h"

namespace lockstep::internal {

// The types of elements that the format knows, by their number in the file.
enum class IdxType : uint8_t {
  uint8 = 0x08,
  int8 = 0x09,
  int16 = 0x0b,
  int32 = 0x0c,
  float32 = 0x0d,
  float64 = 0x0e,
};

// An IDX file, plain or compressed with gzip ("The IDX file format" on the page
// of the MNIST database, yann.lecun.com/exdb/mnist): two zero bytes, the type,
// the number of dimensions; the size of each dimension (32 bits); the elements.
// All numbers are big-endian.
//
// A plain file is mapped. A compressed one is decompressed into memory. The
// claimed sizes are compared with the size of the file before memory is
// allocated.
//
// Any thread may read. Copies share the data.
class IdxFile {
 public:
  // Throws std::system_error if the file cannot be opened, DataFileError if it
  // is not an IDX file, if its size does not fit its header, or if it is
  // damaged.
  explicit IdxFile(const std::string& path);

  const std::string& path() const { return path_; }
  IdxType type() const { return type_; }

  // One dimension or more; the first counts the rows.
  const std::vector<int64_t>& sizes() const { return sizes_; }
  size_t rows() const { return static_cast<size_t>(sizes_[0]); }
  size_t row_bytes() const { return row_bytes_; }

  // Writes row_bytes() to `to`, in the byte order of this machine. Requires
  // `row` < rows().
  void copy_row(size_t row, void* to) const;

 private:
  std::string path_;
  IdxType type_ = IdxType::uint8;
  std::vector<int64_t> sizes_;
  size_t element_bytes_ = 0;
  size_t row_bytes_ = 0;

  // The owner of the elements: the mapped file, or the decompressed bytes.
  std::shared_ptr<const void> owner_;
  const uint8_t* elements_ = nullptr;
};

}  // namespace lockstep::internal
