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

// How the threads of one rank wait for the other ranks, and how these are
// woken. One object a group and rank; any thread.
namespace lockstep::shm {

// The time that one operation has. The clock is read when the spinning is
// over: what is quick never asks it.
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
  // `names`: how messages call the ranks.
  Waiting(const Segment& segment, const PeerLinks& links, int rank, int size,
          std::vector<int> names);

  // Spins for a few microseconds where there is a core for every rank. Returns
  // whether `ready` came true. Where spinning did not help the last times (the
  // peer computes, or another program has its core) it is cut short.
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

  // What a thread sleeps for, as bits. A message wakes nobody who sleeps for
  // calls alone, and the other way round: a receive that is pending for long
  // has a thread that sleeps for it, and must not cost every collective a
  // wake-up.
  enum Bell : uint32_t { kCalls = 1, kMessages = 2 };

  enum class Outcome { ready, timed_out };
  // Whether the wait is over; asked with the order that its loads must have.
  // May also do what brings the end nearer.
  using Ready = std::function<bool(std::memory_order)>;
  // The whole wait after spin(): yields the core, then sleeps, until `ready`.
  // Calls `look`, and that of the thread's BlockedCall, before the first sleep,
  // and whenever one is over (50 ms at most, or a doorbell), to see what became
  // of the ranks; `ready` is asked again after it. What the two throw passes
  // through. `bells`: those of Bell that wake it.
  Outcome sleep(const Ready& ready, uint32_t bells, const Deadline& deadline,
                const std::function<void()>& look);

  // A rank that is not there any more.
  struct Departure {
    int rank;
    bool well;          // it left; else it failed, or its process ended
    bool failed;        // it said that the group is broken
    std::string words;  // "rank 3 died"
  };
  // A system call. What a rank published before it went is visible after it.
  std::vector<Departure> departures() const;

  // After a store (seq_cst) that others may sleep for in a call.
  void wake_sleepers() const {
    if (segment_.sleepers().load(std::memory_order_seq_cst) != 0) wake_all();
  }
  // After a store (seq_cst) that threads of `rank`, another or this one, may
  // sleep for because of a message. Any thread.
  void wake_for_message(int rank) const {
    RankState& state = segment_.state(rank);
    if (state.message_sleepers.load(std::memory_order_seq_cst) != 0) {
      ring(state, kMessages);
    }
  }

  // From now on every wait of this rank throws GroupBroken with `reason` (the
  // first one given), and so do those of the peers, who are told that this
  // rank failed and why. Any thread.
  void break_down(const std::string& reason, uint32_t how = RankState::kFailed);
  [[noreturn]] void fail(const std::string& reason,
                         uint32_t how = RankState::kFailed) {
    break_down(reason, how);
    throw_if_broken();
    throw GroupBroken(reason);  // another thread is just breaking it down
  }
  // This rank ends well: it is not missed by who needs nothing more from it.
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

}  // namespace lockstep::shm
