#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/comm/shm/protocol/core.h"
#include "lockstep/kernels/kernels.h"
#include "lockstep/trace/current_call.h"

namespace lockstep::internal::shm {

enum class CollectiveKind : uint8_t {
  none,
  barrier,
  all_reduce,
  reduce,
  reduce_scatter,
  broadcast,
  all_gather,
  gather,
  scatter,
  all_to_all,
  reduce_buckets,
  split_barrier,
  memory_in_common,
};
const char* name_of(CollectiveKind operation);

// Announcement::agreed of an operation that has a size for each pair of ranks.
inline constexpr uint64_t kSizesDiffer = ~uint64_t{0};

// Reads a text that a rank wrote there. The rank's memory is not trusted to end
// with 0.
template <size_t n>
std::string text_of(const std::array<char, n>& words) {
  return {words.data(), ::strnlen(words.data(), n)};
}

// One rank's part in a collective, from its announcement to its end. Internal
// to the protocol.
//
// The ranks compare `What` and, of the user's call (trace/current_call.h), the
// entry, the parts that are left and the dtype of its tensor. Error texts name
// the user's operation and number; outside of a user's call they name the
// protocol's own.
//
// Announcing is also a barrier that orders the use of memory. A rank announces
// number k when it is done with k - 1. So a rank that has seen all
// announcements of k may write to any memory that was read for k - 1. Memory
// that belongs to the announcements may be written before that, because each
// rank has two of them, which it uses in turn.
class Collective {
 public:
  struct What {
    CollectiveKind operation;
    DType dtype;
    std::optional<ReduceOp> reduce_op{};
    int root{-1};
    uint64_t agreed;  // see Announcement
  };
  // Takes the next sequence number, but only when it is announced: a call that
  // fails before that was not made. Throws GroupBroken if the group is broken.
  Collective(Core& core, const What& what, milliseconds timeout);
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;
  ~Collective();

  // Returns where to write `bytes` of data that travel with the announcement,
  // at most tuning.one_shot_bytes. Write them before announce().
  std::byte* room(size_t bytes);
  std::span<uint64_t> sizes() const {
    return core_.segment.sizes(core_.rank, number_);
  }

  // `bytes` is the size of this rank's data, which is in room() or will be
  // staged. `staged` are the bytes that go through staging memory in this call,
  // for rank 0's StagingStores; 0 if its time does not tell that of the others.
  void announce(uint64_t bytes, size_t staged = 0);
  // Announces data that lies in registered memory.
  void announce(RegisteredMemory::Place place);

  // Waits until every rank has announced this number. Throws CallMismatch if
  // they announced different things.
  void wait_for_all();
  // Throws CallMismatch if the sizes of some pair of ranks disagree. For
  // operations that wrote sizes().
  void compare_sizes() const;

  // Returns what rank `of` announced. Call this and the next four only after
  // wait_for_all().
  const Announcement& announcement(int of) const {
    return core_.segment.announcement(of, number_);
  }
  std::span<const uint64_t> sizes(int of) const {
    return core_.segment.sizes(of, number_);
  }
  const std::byte* data(int of) const;
  // Returns how all ranks write to their staging memory: as rank 0 has chosen.
  kernels::Stores stores() const;
  std::optional<RegisteredMemory::Place> place(int of) const;

  // Waits until `counter` of `peer` is at least `value`; an acquire.
  void await(int peer, const std::atomic<uint64_t>& counter, uint64_t value) {
    if (!core_.waiting.spin([&](std::memory_order order) {
          return counter.load(order) >= value;
        })) {
      await_slowly(peer, counter, value);
    }
  }
  // The same for `counter` of every peer.
  void await_all(std::atomic<uint64_t> RankState::*counter, uint64_t value) {
    for (int peer = 0; peer < core_.size; ++peer) {
      if (peer == core_.rank) continue;
      await(peer, core_.segment.state(peer).*counter, value);
    }
  }
  // Stores `value` with release, and wakes the threads that sleep for it.
  void publish(std::atomic<uint64_t>& counter, uint64_t value) const {
    counter.store(value, std::memory_order_seq_cst);
    core_.waiting.wake_sleepers();
  }

 private:
  using Clock = std::chrono::steady_clock;

  bool has_come(int peer, std::memory_order order) const;
  StagedCalls staged_calls() const;
  void finish_announcement();
  void wait_slowly();
  void await_slowly(int peer, const std::atomic<uint64_t>& counter,
                    uint64_t value);
  bool same(const Announcement& other) const;
  [[noreturn]] void disagree() const;
  void write_words();
  std::string describe(int of) const;
  std::string name() const;

  Core& core_;
  const What what_;
  const uint64_t number_;
  CurrentCall* const user_;  // nullptr if there is none
  Announcement& own_;
  Patience patience_;
  // On rank 0, if the call goes through staging memory.
  size_t staged_ = 0;
  const int exceptions_;  // that were under way when the call began
  std::optional<Clock::time_point> all_have_come_{};
};

// Returns every rank's `own`, in rank order. This is a collective by itself.
template <typename T>
std::vector<T> gather_all(Core& core, const Collective::What& what,
                          const T& own, milliseconds timeout) {
  static_assert(std::is_trivially_copyable_v<T> &&
                sizeof(T) <= Announcement::kInlineBytes);
  Collective call(core, what, timeout);
  std::memcpy(call.room(sizeof(T)), &own, sizeof(T));
  call.announce(sizeof(T));
  call.wait_for_all();
  std::vector<T> all(core.size);
  for (int peer = 0; peer < core.size; ++peer) {
    std::memcpy(&all[peer], call.data(peer), sizeof(T));
  }
  return all;
}

}  // namespace lockstep::internal::shm
