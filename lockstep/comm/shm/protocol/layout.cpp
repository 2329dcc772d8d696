#include "lockstep/comm/shm/protocol/layout.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace lockstep::internal::shm {
namespace {

constexpr size_t kPage = 4096;

constexpr size_t rounded(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

// How many chunks of full size the staging memory of a rank holds.
constexpr size_t kLargeChunks = 2;

// The first page: the counts of sleepers and of news.
constexpr size_t kHead = kPage;

size_t state_bytes(int ranks) {
  return rounded(sizeof(RankState) * ranks, kPage);
}

size_t sizes_bytes(int ranks) {
  return rounded(2 * sizeof(uint64_t) * ranks, kCacheLine);
}

size_t slot_bytes(int ranks, const Tuning& tuning) {
  // An odd number of lines: otherwise slots would begin at equal alignments and
  // share few sets of the caches.
  const size_t lines = (sizeof(Announcement) + sizeof(CallWords) +
                        sizes_bytes(ranks) + tuning.one_shot_bytes) /
                       kCacheLine;
  return (lines | 1) * kCacheLine;
}

size_t slots_bytes(int ranks, const Tuning& tuning) {
  return rounded(slot_bytes(ranks, tuning) * kSlots * ranks, kPage);
}

size_t staging_bytes(int ranks, const Tuning& tuning) {
  return tuning.chunk_bytes * kLargeChunks * ranks;
}

// Returns a size that is large enough to stream through and small enough for 64
// ranks: 256 KiB each for two ranks, 4 KiB for many (17 MiB for 64 x 64).
size_t ring_bytes_for(int ranks) {
  constexpr size_t kAll = size_t{4} << 20;
  const size_t rings = std::max(1, ranks * (ranks - 1));
  return std::clamp(std::bit_floor(kAll / rings), size_t{4} << 10,
                    size_t{256} << 10);
}

size_t ring_stride(int ranks) {
  return sizeof(MessageRing) + ring_bytes_for(ranks);
}

}  // namespace

size_t Segment::bytes(int ranks, const Tuning& tuning) {
  return kHead + state_bytes(ranks) + slots_bytes(ranks, tuning) +
         staging_bytes(ranks, tuning) +
         rounded(ring_stride(ranks) * ranks * ranks, kPage);
}

Segment::Segment(std::shared_ptr<SharedMemory> memory, int ranks,
                 const Tuning& tuning)
    : memory_(std::move(memory)),
      ranks_(ranks),
      tuning_(tuning),
      slot_bytes_(slot_bytes(ranks, tuning)),
      ring_bytes_(ring_bytes_for(ranks)) {
  if (ranks < 1 || ranks > kMaxRanks ||
      memory_->size() != bytes(ranks, tuning)) {
    throw std::invalid_argument(
        "a segment of " + std::to_string(memory_->size()) +
        " bytes does not fit a group of " + std::to_string(ranks) + " ranks");
  }
  auto* at = memory_->data();
  sleepers_ = reinterpret_cast<std::atomic<uint32_t>*>(at);
  news_ = sleepers_ + 1;
  at += kHead;
  states_ = reinterpret_cast<RankState*>(at);
  at += state_bytes(ranks);
  slots_ = at;
  at += slots_bytes(ranks, tuning);
  staging_ = at;
  at += staging_bytes(ranks, tuning);
  rings_ = at;
}

Announcement& Segment::announcement(int rank, uint64_t sequence) const {
  return *reinterpret_cast<Announcement*>(
      slots_ + (rank * kSlots + sequence % kSlots) * slot_bytes_);
}

CallWords& Segment::words(int rank, uint64_t sequence) const {
  auto* at = reinterpret_cast<std::byte*>(&announcement(rank, sequence));
  return *reinterpret_cast<CallWords*>(at + sizeof(Announcement));
}

std::span<uint64_t> Segment::sizes(int rank, uint64_t sequence) const {
  auto* at = reinterpret_cast<std::byte*>(&words(rank, sequence));
  return {reinterpret_cast<uint64_t*>(at + sizeof(CallWords)),
          size_t{2} * ranks_};
}

std::byte* Segment::one_shot(int rank, uint64_t sequence) const {
  return reinterpret_cast<std::byte*>(sizes(rank, sequence).data()) +
         sizes_bytes(ranks_);
}

Chunking Segment::chunking(size_t bytes) const {
  const size_t divided = bytes <= tuning_.chunk_bytes / 2 ? 4 : 1;
  return {.bytes = tuning_.chunk_bytes / divided,
          .slots = kLargeChunks * divided};
}

std::byte* Segment::staging(int rank, uint64_t chunk,
                            const Chunking& by) const {
  return staging_ + rank * kLargeChunks * tuning_.chunk_bytes +
         chunk % by.slots * by.bytes;
}

MessageRing& Segment::ring(int from, int to) const {
  return *reinterpret_cast<MessageRing*>(rings_ + (size_t(from) * ranks_ + to) *
                                                      ring_stride(ranks_));
}

std::byte* Segment::ring_data(int from, int to) const {
  return reinterpret_cast<std::byte*>(&ring(from, to)) + sizeof(MessageRing);
}

}  // namespace lockstep::internal::shm
