#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/base/current_call.h"
#include "lockstep/comm/shm/protocol/core.h"

namespace lockstep::shm {

enum class Operation : uint8_t {
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
const char* name_of(Operation operation);

// Announcement::agreed of what has a size of its own for each pair of ranks.
inline constexpr uint64_t kSizesDiffer = ~uint64_t{0};

// Reads what a rank wrote there, which is not to be trusted to end with 0.
template <size_t n>
std::string text_of(const std::array<char, n>& words) {
  return {words.data(), ::strnlen(words.data(), n)};
}

// One call of one rank, from its announcement to its end. Internal to the
// protocol.
//
// What is compared is `What`, and of the user's call (base/current_call.h) the
// entry, the parts that are left and the dtype of its tensor. Messages name the
// user's operation and number; outside such a call, the protocol's own.
//
// Announcing is also a barrier that orders the use of memory: a rank announces
// number k when it is done with k - 1, so who has seen all announcements of k
// may write wherever k - 1 was read; and what belongs to the announcements
// themselves, of which there are two in turn, may be written before.
class Collective {
 public:
  struct What {
    Operation operation;
    DType dtype;
    std::optional<ReduceOp> reduce_op{};
    int root{-1};
    uint64_t agreed;  // see Announcement
  };
  // Its number is the next, which it takes when it is announced: what fails
  // before has not been called. Throws GroupBroken if the group is.
  Collective(Core& core, const What& what, milliseconds timeout);

  // Before announce(): where `bytes` of data go that travel with it; at most
  // tuning.one_shot_bytes.
  std::byte* room(size_t bytes);
  std::span<uint64_t> sizes() const {
    return core_.segment.sizes(core_.rank, number_);
  }

  // `bytes`: of this rank's data, in room() or to be staged.
  void announce(uint64_t bytes);
  // The data lies in registered memory.
  void announce(RegisteredMemory::Place place);

  // Until every rank has announced this number. Throws CallMismatch if they
  // announced different things.
  void wait_for_all();
  // The sizes of every pair of ranks must agree; for operations that wrote
  // sizes(). Throws CallMismatch.
  void compare_sizes() const;

  // What rank `of` announced; after wait_for_all().
  const Announcement& announcement(int of) const {
    return core_.segment.announcement(of, number_);
  }
  std::span<const uint64_t> sizes(int of) const {
    return core_.segment.sizes(of, number_);
  }
  const std::byte* data(int of) const;
  std::optional<RegisteredMemory::Place> place(int of) const;

  // Until `counter` of `peer` is at least `value`; acquire.
  void await(int peer, const std::atomic<uint64_t>& counter, uint64_t value) {
    if (!core_.waiting.spin([&](std::memory_order order) {
          return counter.load(order) >= value;
        })) {
      await_slowly(peer, counter, value);
    }
  }
  // Release, and wakes who sleeps for it.
  void publish(std::atomic<uint64_t>& counter, uint64_t value) const {
    counter.store(value, std::memory_order_seq_cst);
    core_.waiting.wake_sleepers();
  }

 private:
  bool has_come(int peer, std::memory_order order) const;
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
  CurrentCall* const user_;  // may be none
  Announcement& own_;
  Patience patience_;
};

// Every rank's `own`, in rank order: a collective of its own.
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

}  // namespace lockstep::shm
