#include "lockstep/parallel/healing/place_record.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

namespace lockstep::internal {
namespace {

// One is being written while the other two are whole.
constexpr size_t kSlots = 3;
constexpr size_t kAlignment = 64;

}  // namespace

// The head of a record; its bytes follow.
struct alignas(kAlignment) PlaceRecord::Slot {
  // Which write of this memory has filled the slot, from 1 on; 0 if the slot is
  // empty or being written.
  std::atomic<uint64_t> written;
  int64_t steps;
  uint64_t bytes;
};

PlaceRecord::PlaceRecord(const FileDescriptor& memory, size_t most_bytes)
    : slot_bytes_((sizeof(Slot) + most_bytes + kAlignment - 1) / kAlignment *
                  kAlignment),
      bytes_(kSlots * slot_bytes_) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  struct stat status {};
  if (::fstat(memory.get(), &status) != 0) throw_errno("the place's memory");
  if (status.st_size == 0) {
    // Reserves the pages: a later write cannot fail.
    const int error =
        ::posix_fallocate(memory.get(), 0, static_cast<off_t>(bytes_));
    if (error != 0) {
      throw std::system_error(error, std::generic_category(),
                              "HealedTraining: " + std::to_string(bytes_) +
                                  " bytes for generators and buffers");
    }
  } else if (static_cast<size_t>(status.st_size) != bytes_) {
    throw std::runtime_error(
        "HealedTraining: the process before in this rank's place had other "
        "buffers in its module: " +
        std::to_string(status.st_size) + " bytes with their copies, not " +
        std::to_string(bytes_) + "; all processes must make the same module");
  }
  void* mapped = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED,
                        memory.get(), 0);
  if (mapped == MAP_FAILED) throw_errno("mapping the place's memory");
  data_ = static_cast<std::byte*>(mapped);
}

PlaceRecord::~PlaceRecord() { ::munmap(data_, bytes_); }

PlaceRecord::Slot& PlaceRecord::slot(size_t index) const {
  return *reinterpret_cast<Slot*>(data_ + index * slot_bytes_);
}

void PlaceRecord::write(int64_t steps, std::span<const Bytes> parts) {
  uint64_t last = 0;
  Slot* oldest = &slot(0);
  for (size_t i = 0; i < kSlots; ++i) {
    Slot& one = slot(i);
    last = std::max(last, one.written.load(std::memory_order_relaxed));
    if (one.written.load(std::memory_order_relaxed) <
        oldest->written.load(std::memory_order_relaxed)) {
      oldest = &one;
    }
  }
  // A process that reads this memory after this one has been killed sees the
  // stores in the order in which this one made them.
  oldest->written.store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  auto* to = reinterpret_cast<std::byte*>(oldest + 1);
  oldest->bytes = 0;
  for (const Bytes part : parts) {
    if (sizeof(Slot) + oldest->bytes + part.size() > slot_bytes_) {
      throw std::length_error("PlaceRecord: the record is too large");
    }
    std::memcpy(to + oldest->bytes, part.data(), part.size());
    oldest->bytes += part.size();
  }
  oldest->steps = steps;
  oldest->written.store(last + 1, std::memory_order_release);
}

std::optional<PlaceRecord::Bytes> PlaceRecord::read(int64_t steps) const {
  const Slot* newest = nullptr;
  for (size_t i = 0; i < kSlots; ++i) {
    const Slot& one = slot(i);
    const uint64_t written = one.written.load(std::memory_order_acquire);
    if (written == 0 || one.steps != steps) continue;
    if (newest == nullptr || newest->written < written) newest = &one;
  }
  if (newest == nullptr) return std::nullopt;
  return Bytes(reinterpret_cast<const std::byte*>(newest + 1), newest->bytes);
}

}  // namespace lockstep::internal
