#include "lockstep/parallel/healing/place_record.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "lockstep/base/shared_memory.h"
#include "lockstep/checkpoint/sharded/checksum.h"
#include "lockstep/kernels/kernels.h"

namespace lockstep::internal {
namespace {

constexpr int kSlotBits = 40;
// A chunk is still in the cache after its checksum was computed.
constexpr size_t kChunk = size_t{128} << 10;
// A larger record goes past the cache, where the next step needs the room.
constexpr size_t kCached = size_t{1} << 20;

}  // namespace

// The head of a record; its bytes follow.
struct alignas(64) PlaceRecord::Slot {
  // Which write of this memory has filled the slot, from 1 on; 0 if the slot is
  // empty or being written.
  std::atomic<uint64_t> written;
  int64_t steps;
  uint64_t bytes;
  uint64_t checksum;  // XXH3 of the bytes
};

PlaceRecord::PlaceRecord(const FileDescriptor& memory, size_t first,
                         size_t slots)
    : memory_(memory), first_(first), mappings_(slots) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  for (size_t i = 0; i < slots; ++i) map(i, sizeof(Slot));
}

PlaceRecord::~PlaceRecord() {
  for (const Mapping& mapping : mappings_) {
    if (mapping.data) ::munmap(mapping.data, mapping.bytes);
  }
}

PlaceRecord::Slot& PlaceRecord::slot(size_t index) const {
  return *reinterpret_cast<Slot*>(mappings_[index].data);
}

void PlaceRecord::map(size_t index, size_t bytes) {
  Mapping& mapping = mappings_[index];
  if (bytes <= mapping.bytes) return;
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  const auto begin = static_cast<off_t>((first_ + index) << kSlotBits);
  require_file_size(begin + bytes,
                    "HealedTraining: could not make a copy of this rank's "
                    "state, which lies in a sparse file of " +
                        std::to_string(begin + bytes) + " bytes");
  // Reserves the pages: a later write to them cannot fail. What they hold
  // stays.
  int error = EINTR;  // by a signal, before Linux 6.11
  while (error == EINTR) {
    error = ::posix_fallocate(memory_.get(), begin, static_cast<off_t>(bytes));
  }
  if (error != 0) {
    throw std::system_error(error, std::generic_category(),
                            "HealedTraining: " + std::to_string(bytes) +
                                " bytes for a copy of this rank's state");
  }
  void* mapped = mapping.data ? ::mremap(mapping.data, mapping.bytes, bytes,
                                         MREMAP_MAYMOVE)
                              : ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                       MAP_SHARED, memory_.get(), begin);
  if (mapped == MAP_FAILED) throw_errno("mapping the place's memory");
  mapping = {static_cast<std::byte*>(mapped), bytes};
}

void PlaceRecord::write(int64_t steps, std::span<const Bytes> parts) {
  uint64_t last = 0;
  size_t oldest = 0;
  for (size_t i = 0; i < mappings_.size(); ++i) {
    const uint64_t written = slot(i).written.load(std::memory_order_relaxed);
    last = std::max(last, written);
    if (written < slot(oldest).written.load(std::memory_order_relaxed)) {
      oldest = i;
    }
  }
  uint64_t bytes = 0;
  for (const Bytes part : parts) bytes += part.size();
  // A process that reads this memory after this one has been killed sees the
  // stores in the order in which this one made them.
  slot(oldest).written.store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  map(oldest, sizeof(Slot) + bytes);
  Slot& one = slot(oldest);
  auto* to = reinterpret_cast<std::byte*>(&one + 1);
  const auto stores =
      bytes > kCached ? kernels::Stores::streaming : kernels::Stores::cached;
  Xxh3 checksum;
  for (Bytes part : parts) {
    while (!part.empty()) {
      const Bytes chunk = part.first(std::min(part.size(), kChunk));
      checksum.add(chunk.data(), chunk.size());
      kernels::copy(to, chunk.data(), chunk.size(), stores);
      to += chunk.size();
      part = part.subspan(chunk.size());
    }
  }
  one.steps = steps;
  one.bytes = bytes;
  one.checksum = checksum.value();
  one.written.store(last + 1, std::memory_order_release);
}

std::optional<PlaceRecord::Bytes> PlaceRecord::read(int64_t steps) {
  std::optional<size_t> newest;
  uint64_t newest_written = 0;
  for (size_t i = 0; i < mappings_.size(); ++i) {
    const uint64_t written = slot(i).written.load(std::memory_order_acquire);
    if (written <= newest_written || slot(i).steps != steps) continue;
    newest = i;
    newest_written = written;
  }
  if (!newest) return std::nullopt;
  map(*newest, sizeof(Slot) + slot(*newest).bytes);
  const Slot& one = slot(*newest);
  const Bytes bytes(reinterpret_cast<const std::byte*>(&one + 1), one.bytes);
  if (xxh3(bytes.data(), bytes.size()) != one.checksum) {
    throw std::runtime_error(
        "HealedTraining: the copy of this rank's state after step " +
        std::to_string(steps) + " does not match its checksum");
  }
  return bytes;
}

std::vector<int64_t> PlaceRecord::steps() const {
  std::vector<int64_t> all;
  for (size_t i = 0; i < mappings_.size(); ++i) {
    if (slot(i).written.load(std::memory_order_acquire) != 0) {
      all.push_back(slot(i).steps);
    }
  }
  return all;
}

std::vector<PlaceRecord::Record> PlaceRecord::written_after(uint64_t after) {
  std::vector<Record> all;
  for (size_t i = 0; i < mappings_.size(); ++i) {
    const uint64_t written = slot(i).written.load(std::memory_order_acquire);
    if (written <= after) continue;
    map(i, sizeof(Slot) + slot(i).bytes);
    const Slot& one = slot(i);
    all.push_back({written,
                   one.steps,
                   {reinterpret_cast<const std::byte*>(&one + 1), one.bytes}});
  }
  std::ranges::sort(all, {}, &Record::number);
  return all;
}

void PlaceRecord::forget_after(int64_t steps) {
  for (size_t i = 0; i < mappings_.size(); ++i) {
    if (slot(i).steps > steps) {
      slot(i).written.store(0, std::memory_order_release);
    }
  }
}

void PlaceRecord::forget_all() {
  for (size_t i = 0; i < mappings_.size(); ++i) {
    slot(i).written.store(0, std::memory_order_release);
  }
}

}  // namespace lockstep::internal
