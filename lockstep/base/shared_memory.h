#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// How many bytes of something exist now, and the most there have been. Threads:
// any; no thread waits. A peak is never lower than what was in use at some
// moment, and never higher than what all threads had added by then.
class ByteCount {
 public:
  void add(int64_t bytes) noexcept {
    const int64_t now =
        used_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    int64_t peak = peak_.load(std::memory_order_relaxed);
    while (peak < now &&
           !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }
  void remove(int64_t bytes) noexcept {
    used_.fetch_sub(bytes, std::memory_order_relaxed);
  }

  int64_t used() const noexcept {
    return used_.load(std::memory_order_relaxed);
  }
  // The most since reset_peak().
  int64_t peak() const noexcept {
    return peak_.load(std::memory_order_relaxed);
  }
  void reset_peak() noexcept { peak_.store(used(), std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> used_{0};
  std::atomic<int64_t> peak_{0};
};

// Anonymous memory (memfd_create(2)) that other processes can map if they are
// given its descriptor. It has no name that could be guessed, squatted or left
// behind: it is freed when no process holds it any more. Its pages are reserved
// when it is made, so that a later write cannot fail (SIGBUS). Its size is
// sealed, so that no process can shrink it while another one uses it.
//
// Owns the mapping and the descriptor. Movable, not copyable. Not synchronised.
// All processes that map the memory share it, a forked child too.
class SharedMemory {
 public:
  SharedMemory() = default;

  // Makes `bytes` (more than 0) of zeros, in huge pages if the system has some
  // (before Linux 6.1: if it gives these to shared memory). Throws
  // std::system_error with the size if the system does not have that much
  // memory, or has no such memory at all; std::invalid_argument for 0 bytes.
  static SharedMemory create(size_t bytes);

  // Counts the bytes that create() made in this process and that this process
  // still maps. Memory that another process made is counted there.
  static ByteCount& made();

  // Maps memory that create() made in another process. Pages::all maps all of
  // its pages now, as touch() does; Pages::none maps each page at touch() or at
  // its first use.
  // Throws std::system_error, or std::invalid_argument if `descriptor` is not
  // such memory (not sealed, or not of `bytes`).
  enum class Pages { all, none };
  static SharedMemory map(FileDescriptor descriptor, size_t bytes,
                          Pages pages = Pages::all);
  // Maps all pages now, if the kernel can (Linux 5.14); needs no descriptor.
  // Throws std::system_error.
  void touch() const;

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // Begins at a multiple of 4,096 bytes; at a multiple of 2 MiB if the memory
  // is at least that large.
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }
  explicit operator bool() const { return data_ != nullptr; }
  // The descriptor to give to another process (SCM_RIGHTS); -1 after
  // close_descriptor().
  int descriptor() const { return descriptor_.get(); }
  // Closes the descriptor and keeps the mapping. A process may have few
  // descriptors (ulimit -n).
  void close_descriptor() { descriptor_.reset(); }

 private:
  SharedMemory(FileDescriptor descriptor, size_t bytes);
  void collapse() const;
  bool populate(const char* what) const;
  void reserve() const;

  FileDescriptor descriptor_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  bool made_here_ = false;  // counted in made()
};

// Throws std::system_error, which begins with `what`, if a file of so many
// bytes is beyond the limit on the size of files: the kernel would send
// SIGXFSZ, which kills the process.
void require_file_size(uint64_t bytes, const std::string& what);

}  // namespace lockstep::internal
