#pragma once

#include <cstddef>
#include <span>

#include "lockstep/base/file_descriptor.h"

namespace lockstep {

// Anonymous memory that other processes map once they are handed its
// descriptor (memfd_create(2)). It has no name that could be guessed, squatted
// or left behind: it goes with the last process that holds it. Its pages are
// reserved when it is made, so that writing to it later cannot fail (SIGBUS),
// and its size is sealed, so that no holder can cut it under another.
//
// Owns the mapping and the descriptor. Movable, not copyable. Not
// synchronised; the memory is shared by whoever maps it, a forked child too.
class SharedMemory {
 public:
  SharedMemory() = default;

  // `bytes` of zeros, more than 0. In huge pages where the system lends them
  // to shared memory. Throws std::system_error with the size if there is not
  // that much, or no such memory at all, std::invalid_argument for 0.
  static SharedMemory create(size_t bytes);

  // Maps what create() made in another process: with all its pages, or without
  // any until touch() or their first use. Throws std::system_error, or
  // std::invalid_argument if `descriptor` is not such memory (not sealed, or
  // not of `bytes`).
  enum class Pages { all, none };
  static SharedMemory map(FileDescriptor descriptor, size_t bytes,
                          Pages pages = Pages::all);
  // Maps all pages. Throws std::system_error.
  void touch() const;

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // Begins at a multiple of 4,096 bytes; of 2 MiB if it is that large.
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }
  explicit operator bool() const { return data_ != nullptr; }
  // To hand to another process (SCM_RIGHTS). -1 once it is closed.
  int descriptor() const { return descriptor_.get(); }
  // The mapping stays. Descriptors are few (ulimit -n).
  void close_descriptor() { descriptor_.reset(); }

 private:
  SharedMemory(FileDescriptor descriptor, size_t bytes);
  void populate(const char* what) const;

  FileDescriptor descriptor_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace lockstep
