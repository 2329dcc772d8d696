#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/shm/protocol/layout.h"
#include "lockstep/comm/shm/protocol/waiting.h"

// Finds ranks that wait for each other in different collective calls and would
// do so until the timeout. They are found within a second, even if these calls
// exchange no announcements that could be compared (because one of them reduces
// buckets).
//
// The notice: a rank whose only thread in this group waits says so in the
// segment (BlockedState): in which call, for which ranks, and how often it
// has looked whether its wait is over. It tells nothing
// - if several threads of this rank have made collective calls, as another one
//   may do what the peers wait for;
// - while asynchronous collectives of this rank are pending, for the same
//   reason, unless its thread waits for these: then the thread that runs them
//   tells for it;
// - while it waits for a message, which any thread may send.
//
// The standstill: rank A, which tells a wait itself, waits for rank B. A
// sees that B tells one and the same wait, for A among others, while B looks
// kLooks times and kPatience passes.
//
// Why a healthy job is never blamed. B's wait can only end by something that A
// does. All that A had done before it told its wait was visible to B in its
// last look, and it was not enough. (A's stores, A's load of `looks`, B's store
// of `looks` and B's loads are seq_cst, so if A's load does not see B's store
// then B's later loads see A's stores.) A's only thread waits, and A has no
// asynchronous collectives. The same holds with A and B exchanged, as A looks
// itself. So neither can go on. A rank that computes tells nothing, and one
// that is stopped (SIGSTOP) does not look.
//
// The one exception: a second thread of A or B that has made no collective call
// in this group yet, and whose first call the other rank waits for. To avoid
// that, make an earlier call (a barrier) in that thread, or make all calls in
// one thread.
//
// Why the plain case is not missed. Two ranks, each used by one thread, that
// block in calls which need each other tell so after a millisecond and look
// every 10 ms.
//
// Not seen: waits for messages, and waits outside the group's segment (in the
// store, in another group, for a peer on another host).
namespace lockstep::internal::shm {

class BlockedCall;

// One object per rank and group.
class Standstill {
 public:
  Standstill(const Segment& segment, Waiting& waiting, int rank, int size);

  // Called when a thread of the caller begins a collective call. Any thread.
  void thread_comes() {
    const void* here = this_thread();
    const void* first = thread_.load(std::memory_order_relaxed);
    if (first != here) another_comes(first, here);
  }

  // Called when an asynchronous collective of this rank was queued, and when it
  // has ended.
  void queued() { queued_.fetch_add(1); }
  void dequeued() { queued_.fetch_sub(1); }
  // Called when the caller's thread begins to wait for asynchronous
  // collectives, and when it goes on. Pairs do not nest.
  void caller_waits();
  void caller_goes_on();
  // Marks the thread that runs asynchronous collectives, while it does.
  // `beside`: it is not the caller's thread.
  class OnQueue {
   public:
    explicit OnQueue(bool beside);
    ~OnQueue();
    OnQueue(const OnQueue&) = delete;
    OnQueue& operator=(const OnQueue&) = delete;

   private:
    std::optional<Waiting::Helper> helper_{};
  };

 private:
  friend class BlockedCall;

  static constexpr uint64_t kLooks = 3;
  static constexpr std::chrono::milliseconds kPatience{300};

  // A peer's wait, as this rank saw it when it last changed.
  struct Seen {
    uint64_t wait = 0;
    uint64_t looks = 0;
    std::chrono::steady_clock::time_point since{};
  };

  static const void* this_thread();
  void another_comes(const void* first, const void* here);
  BlockedState& state(int rank) const { return segment_.state(rank).blocked; }
  bool may_tell() const;
  void tell(const BlockedCall& call, uint64_t ranks);
  void fall_silent();
  bool stands_still(int peer);
  std::string words_of(int rank) const;
  std::vector<std::string> words_of_all() const;
  [[noreturn]] void fail(const std::vector<std::string>& words_of_all);

  const Segment& segment_;
  Waiting& waiting_;
  const int rank_;
  const int size_;
  std::atomic<const void*> thread_{nullptr};
  std::atomic<bool> several_{false};
  std::atomic<int> queued_{0};
  std::mutex mutex_;  // guards what follows
  bool caller_waits_ = false;
  const BlockedCall* told_ = nullptr;
  bool told_on_queue_ = false;
  std::vector<Seen> seen_;
};

// One wait of one thread, for as long as this lives. Waiting::sleep() calls
// look() of the innermost one of its thread.
class BlockedCall {
 public:
  // Returns the ranks, as bits, that are waited for; 0 if the wait is over.
  using Ranks = std::function<uint64_t(std::memory_order)>;
  // Returns the call in words: "backward(), at reduce_buckets #3".
  using Words = std::function<std::string()>;

  BlockedCall(Standstill& standstill, Ranks ranks, Words words);
  ~BlockedCall();
  BlockedCall(const BlockedCall&) = delete;
  BlockedCall& operator=(const BlockedCall&) = delete;

  static BlockedCall* of_this_thread();
  // Throws GroupBroken, on all ranks, if there is a standstill.
  void look();

 private:
  friend class Standstill;
  Standstill& standstill_;
  const Ranks ranks_;
  const Words words_;
  BlockedCall* const before_;
};

}  // namespace lockstep::internal::shm
