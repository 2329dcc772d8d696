#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "lockstep/base/shared_memory.h"
#include "lockstep/comm/shm/protocol/tuning.h"

// The layout of the segment of a group. All zeros is the state before the first
// operation, so no rank has to initialise it. docs/internals/shared-memory.md
// has a picture of it and a table of each release with its acquire.
namespace lockstep::internal::shm {

inline constexpr int kMaxRanks = 64;
inline constexpr size_t kCacheLine = 64;
// Announcements of a rank: one in use, one that is being filled.
inline constexpr int kSlots = 2;

// How one operation divides each rank's staging memory: into `slots` chunks of
// `bytes`, used in turn, at least two of them.
struct Chunking {
  size_t bytes;
  uint64_t slots;
};

// How a rank enters a collective: what it calls and, if it fits, its data, in
// one cache line.
struct alignas(kCacheLine) Announcement {
  static constexpr size_t kInlineBytes = 32;

  // Low half of the sequence number. Written last, with release: everything
  // else here, and the data that belongs to it, is complete then.
  std::atomic<uint32_t> sequence;
  uint8_t operation;
  uint8_t dtype;
  uint8_t reduce_op;
  uint8_t flags;    // not compared
  uint64_t agreed;  // elements, bytes or kSizesDiffer; compared
  // The size of this rank's data, or the number of the registered region that
  // holds it; not compared.
  uint64_t bytes;
  int8_t root;
  // Compared; from CurrentCall (trace/current_call.h): the code of the user's
  // dtype, the parts that are left, and the low half of the entry.
  uint8_t element;
  uint16_t parts_left;
  uint32_t entry;
  std::array<std::byte, kInlineBytes> data;  // or the offset in the region
};
static_assert(sizeof(Announcement) == kCacheLine);

// The function that the user called, for error texts. Written before the
// announcement, and only if it changes: a processor that reads a cache line may
// fetch the next one too, so a store beside the announcement in each call would
// slow down the peers.
struct alignas(kCacheLine) CallWords {
  // The user's number minus that of the announcement, modulo 2^64.
  uint64_t ahead;
  // Each ends with 0.
  std::array<char, 47> function;  // "save_snapshot()", or nothing
  std::array<char, 40> operation;
  std::array<char, 24> dtype;
  uint8_t units;  // ElementType::units
};
static_assert(sizeof(CallWords) == 2 * kCacheLine);

// The wait of a rank, for standstill.h. Written by that rank.
struct BlockedState {
  static constexpr size_t kWords = 21;
  alignas(kCacheLine) std::atomic<uint64_t> wait;  // odd while it waits
  std::atomic<uint64_t> waits_for;                 // the ranks, as bits
  std::atomic<uint64_t> looks;  // how often it has looked if its wait is over
  std::array<std::atomic<uint64_t>, kWords> words;  // a text, ends with 0
};
static_assert(sizeof(BlockedState) == 3 * kCacheLine);

// The announcement of one rank to all others. Fields that are written at
// different times lie in different cache lines.
struct RankState {
  // How far the rank is in the chunks of large operations, counted over the
  // life of the group. Written with release.
  alignas(kCacheLine) std::atomic<uint64_t> staged;   // copied in
  alignas(kCacheLine) std::atomic<uint64_t> reduced;  // its slice is done
  alignas(kCacheLine) std::atomic<uint64_t> taken;    // copied out

  // The word on which this rank's threads sleep (futex). A thread that wakes
  // them adds 1 to it.
  alignas(kCacheLine) std::atomic<uint32_t> doorbell;
  // How many threads of this rank sleep, or are about to: for a call of all
  // ranks, and for a message. A thread that sleeps for both counts in both.
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> message_sleepers;

  // The rank's last words. `left` is written with release after `reason`.
  // kFailed: `reason` is what failed on this rank. kTold: the rank has failed,
  // and `reason` names the rank, or the ranks, that failed first.
  enum : uint32_t { kHere = 0, kLeft = 1, kFailed = 2, kTold = 3 };
  alignas(kCacheLine) std::atomic<uint32_t> left;
  std::array<char, 444> reason;  // ends with 0
  // The number that the rank announced last, for error texts if it does not
  // come.
  std::atomic<uint64_t> last_sequence;
  // The core on which the rank announced, or last waited. Only a hint.
  std::atomic<int> core;
  // 1: an operation of this rank failed because of another rank, which `reason`
  // names, if `left` does not say otherwise. Written with release after
  // `reason`.
  std::atomic<uint32_t> has_cause;
  // The cores that the rank's process may run on, as sched_getaffinity() gives
  // them, at most 1,024. Written before the group begins.
  alignas(kCacheLine) std::array<uint64_t, 16> cores;
  BlockedState blocked;
};

// A ring of bytes from one rank to another. Positions only grow; position p
// lies at p % bytes.
struct MessageRing {
  alignas(kCacheLine) std::atomic<uint64_t> written;  // by the sender, release
  // Where the last message ends that the sender gave up half-way; the next head
  // comes after this position. 0 if there was none. Written before `written`
  // passes this position, and only after `read` has passed the one before.
  std::atomic<uint64_t> cut;
  alignas(kCacheLine) std::atomic<uint64_t> read;  // by the receiver, release
};

// The parts of the segment. Keeps its memory alive.
class Segment {
 public:
  // Returns the size of all that a group of `ranks` needs, a multiple of the
  // page size.
  static size_t bytes(int ranks, const Tuning& tuning);

  // `memory` must have the size bytes(ranks, tuning).
  Segment(std::shared_ptr<SharedMemory> memory, int ranks,
          const Tuning& tuning);

  // How many threads of all ranks sleep for a call. If it is 0, a thread that
  // publishes something for calls need not search for sleepers.
  std::atomic<uint32_t>& sleepers() const { return *sleepers_; }
  // How often ranks have sent news of registered memory, modulo 2^32. So a rank
  // sees without a system call whether there is news to look for. It lies
  // beside sleepers(), which every call reads.
  std::atomic<uint32_t>& news() const { return *news_; }
  RankState& state(int rank) const { return states_[rank]; }

  Announcement& announcement(int rank, uint64_t sequence) const;
  CallWords& words(int rank, uint64_t sequence) const;
  // The sizes, which lie after these two: for each rank the bytes that go to
  // it, then for each rank the bytes that are expected from it. 2 * ranks
  // numbers.
  std::span<uint64_t> sizes(int rank, uint64_t sequence) const;
  // The room for data, tuning.one_shot_bytes, which lies after the sizes.
  std::byte* one_shot(int rank, uint64_t sequence) const;

  // Returns how an operation on `bytes` of data divides staging memory. Small
  // data uses more and smaller chunks in turn: when such a chunk is written
  // again, its lines are no longer in the nearest cache of the peer that read
  // them last, from where they are slow to take back.
  Chunking chunking(size_t bytes) const;
  std::byte* staging(int rank, uint64_t chunk, const Chunking& by) const;

  MessageRing& ring(int from, int to) const;
  std::byte* ring_data(int from, int to) const;
  size_t ring_bytes() const { return ring_bytes_; }  // a power of two

 private:
  std::shared_ptr<SharedMemory> memory_;
  int ranks_;
  Tuning tuning_;
  size_t slot_bytes_;
  size_t ring_bytes_;
  std::atomic<uint32_t>* sleepers_;
  std::atomic<uint32_t>* news_;
  RankState* states_;
  std::byte* slots_;
  std::byte* staging_;
  std::byte* rings_;
};

}  // namespace lockstep::internal::shm
