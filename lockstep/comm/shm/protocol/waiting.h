#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/shm/protocol/errors.h"
#include "lockstep/comm/shm/protocol/layout.h"
#include "lockstep/comm/shm/protocol/peer_links.h"

// How the threads of one rank wait for the other ranks, and how they wake
// threads that wait. One object per group and rank; any thread.
namespace lockstep::internal::shm {

// The time that one operation has. The clock is first read when the spinning is
// over, so a quick operation never reads it.
class Patience {
 public:
  explicit Patience(std::chrono::milliseconds allowed) : allowed_(allowed) {}
  const Deadline& deadline() {
    if (!deadline_) deadline_ = Deadline::after(allowed_);
    return *deadline_;
  }

 private:
  std::chrono::milliseconds allowed_;
  std::optional<Deadline> deadline_{};
};

class Waiting {
 public:
  // `names` is how error texts name the ranks; if it is empty, they use the
  // numbers in this group.
  Waiting(const Segment& segment, const PeerLinks& links, int rank, int size,
          std::vector<int> names);

  // Spins for a few microseconds if there is a core for every rank. Returns
  // whether `ready` came true. If spinning did not help the last times (the
  // peer computes, or another program has its core), the spin is shorter.
  template <typename Ready>
  bool spin(Ready ready) {
    const int spins = spins_.load(std::memory_order_relaxed);
    for (int i = 0; i < spins; ++i) {
      if (ready(std::memory_order_acquire)) {
        if (spins < most_spins_ && i > 0) {
          spins_.store(std::min(2 * spins, most_spins_),
                       std::memory_order_relaxed);
        }
        return true;
      }
      pause();
    }
    if (spins > kLeastSpins) {
      spins_.store(spins / 2, std::memory_order_relaxed);
    }
    return ready(std::memory_order_acquire);
  }

  // What a thread sleeps for, as bits. A message does not wake a thread that
  // sleeps only for calls, nor a call one that sleeps only for messages. A
  // receive that is pending for long has a thread that sleeps for it, and must
  // not cost every collective a wake-up.
  enum Bell : uint32_t { kCalls = 1, kMessages = 2 };

  enum class Outcome { ready, timed_out };
  // Returns whether the wait is over; its loads must have the given memory
  // order. May also do something that ends the wait sooner.
  using Ready = std::function<bool(std::memory_order)>;
  // The rest of a wait after spin(): yields the core, then sleeps, until
  // `ready`. Before the first sleep and after each one (50 ms at most, or until
  // a doorbell rings) it calls `look`, and look() of the thread's BlockedCall,
  // to see what became of the ranks, and then asks `ready` again. Whatever
  // these two throw passes through. `bells` are the bits of Bell that wake the
  // thread.
  Outcome sleep(const Ready& ready, uint32_t bells, const Deadline& deadline,
                const std::function<void()>& look);

  // A rank that is gone.
  struct Departure {
    int rank;
    bool well;          // it left; otherwise it failed or its process ended
    bool failed;        // it said that the group is broken
    std::string words;  // "rank 3 died"
  };
  // Returns the ranks that are gone; a system call. What such a rank published
  // before it went is visible afterwards.
  std::vector<Departure> departures() const;

  // Call this after a store (seq_cst) that other threads may sleep for in a
  // call.
  void wake_sleepers() const {
    if (segment_.sleepers().load(std::memory_order_seq_cst) != 0) wake_all();
  }
  // Call this after a store (seq_cst) that threads of `rank`, another or this
  // one, may sleep for because of a message. Any thread.
  void wake_for_message(int rank) const {
    RankState& state = segment_.state(rank);
    if (state.message_sleepers.load(std::memory_order_seq_cst) != 0) {
      ring(state, kMessages);
    }
  }

  // Makes every wait of this rank throw GroupBroken with `reason` (the first
  // one given) from now on, and every wait of the peers, which are told that
  // this rank failed and why. Any thread.
  void break_down(const std::string& reason, uint32_t how = RankState::kFailed);
  [[noreturn]] void fail(const std::string& reason,
                         uint32_t how = RankState::kFailed) {
    break_down(reason, how);
    throw_if_broken();
    // Another thread is just breaking the group down.
    throw GroupBroken(reason);
  }
  // Ends this rank well: peers that need nothing more from it go on.
  void leave() const;
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  void throw_if_broken() const;

  // "rank 3"
  std::string name(int rank) const;

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
  }
  void wake_all() const;
  void wake_everybody() const;
  static void ring(RankState& state, uint32_t bells);
  std::string words_of(int rank) const;

  const Segment& segment_;
  const PeerLinks& links_;
  int rank_;
  int size_;
  std::vector<int> names_;
  static constexpr int kLeastSpins = 16;
  int most_spins_;
  std::atomic<int> spins_;
  std::atomic<bool> broken_{false};
  std::atomic<bool> breaking_{false};
  std::string reason_;
};

}  // namespace lockstep::internal::shm
