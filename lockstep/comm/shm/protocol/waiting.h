#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
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

  // The begin of a wait, without a system call or a clock: looks for about
  // 3 us, or once if there are more ranks than cores. Returns whether `ready`
  // came true.
  template <typename Ready>
  bool spin(Ready ready) {
    if (!spins_) return ready(std::memory_order_acquire);
    for (int i = 0; i < kGlances; ++i) {
      if (ready(std::memory_order_acquire)) {
        if (spin_limit_.load(std::memory_order_relaxed) < kMostSpinning) {
          lengthen();
        }
        return true;
      }
      pause();
    }
    return ready(std::memory_order_acquire);
  }

  // Marks a thread that works beside a thread of the caller, while this object
  // exists. It yields its core while it waits, as the other may compute.
  class Helper {
   public:
    Helper();
    ~Helper();
    Helper(const Helper&) = delete;
    Helper& operator=(const Helper&) = delete;
  };

  // The events that wake a thread, as bits. A message does not wake a thread
  // that sleeps only for calls, nor a call one that sleeps only for messages. A
  // receive that is pending for long has a thread that sleeps for it, and must
  // not cost every collective a wake-up.
  enum Bell : uint32_t { kCalls = 1, kMessages = 2 };

  enum class Outcome { ready, timed_out };
  // Returns whether the wait is over; its loads must have the given memory
  // order. May also do something that ends the wait sooner.
  using Ready = std::function<bool(std::memory_order)>;
  // The rest of a wait after spin(): keeps the core for some milliseconds
  // (keep_core()) or yields it for one, then sleeps, until `ready`. Before the
  // first sleep and after each one (10 ms at most, or until
  // a doorbell rings) it calls `look`, and look() of the thread's BlockedCall,
  // to see what became of the ranks, and then asks `ready` again. Whatever
  // these two throw passes through. `bells` are the bits of Bell that wake the
  // thread.
  Outcome sleep(const Ready& ready, uint32_t bells, const Deadline& deadline,
                const std::function<void()>& look);

  // A rank that is gone.
  struct Departure {
    int rank;
    bool well;    // it left; otherwise it failed or its process ended
    bool failed;  // it said that the group is broken
    // "rank 3 died". If this rank went because of another one, as far as it has
    // said so, the words are about that other rank.
    std::string words;
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
  // one given) from now on, and every wait of the peers. They are told that
  // this rank failed and why; with kTold, if another rank was the cause, only
  // `reason`. Any thread.
  void break_down(const std::string& reason, uint32_t how = RankState::kFailed);
  [[noreturn]] void fail(const std::string& reason,
                         uint32_t how = RankState::kFailed) {
    break_down(reason, how);
    throw_if_broken();
    // Another thread is just breaking the group down.
    throw GroupBroken(reason);
  }
  // Tells the peers what to say if they miss this rank after its end, in place
  // of "rank 3 died" or "rank 3 has left the group": `cause`, the failure of
  // another rank, because of which an operation of this one failed. The first
  // cause counts. The group goes on. Any thread.
  void keep_cause(const std::string& cause);
  // Ends this rank well: peers that need nothing more from it go on.
  void leave() const;
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  void throw_if_broken() const;

  // Return 3 and "rank 3", the rank's name in the default group.
  int number(int rank) const { return names_.empty() ? rank : names_[rank]; }
  std::string name(int rank) const;

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
  }
  // Whether this thread must not keep its core while it waits: there are fewer
  // cores than ranks, or it is a Helper.
  bool yields() const;
  // Returns whether `ready` came true meanwhile.
  bool yield_core(const Ready& ready, const Deadline& deadline) const;
  // Spins until `ready`, and returns whether it came true.
  //
  // A thread that gives up its core while another program wants it gets it back
  // late: after a time slice, some milliseconds. If the ranks do that in turn,
  // they never run at the same time, and each of their calls takes a slice. So
  // a thread spins for about a slice: a peer that was preempted is back then.
  //
  // It spins for a shorter time if that did not help lately, as the peers
  // compute for longer than a slice: each spin in vain halves the limit, each
  // wait that a spin has ended doubles it.
  //
  // If another rank is on this thread's core, where the scheduler may put both
  // for a while, spinning would only delay it. So this thread offers it the
  // core, and then sleeps.
  bool keep_core(const Ready& ready, const Deadline& deadline);
  static bool offer_core(const Ready& ready);
  void lengthen();
  bool shares_core() const;
  void wake_all() const;
  void wake_everybody() const;
  static void ring(RankState& state, uint32_t bells);
  std::string words_of(int rank) const;
  void write_reason(const std::string& reason);
  bool has_left() const;  // leave() was called, and nothing failed before

  const Segment& segment_;
  const PeerLinks& links_;
  int rank_;
  int size_;
  std::vector<int> names_;
  // Looks at a cache line before the clock is read: about 3 us.
  static constexpr int kGlances = 50;
  static constexpr int64_t kLeastSpinning = 20'000;  // in nanoseconds
  static constexpr int64_t kMostSpinning = 4'000'000;
  const bool spins_;  // there is a core for every rank
  std::atomic<int64_t> spin_limit_{kMostSpinning};  // in nanoseconds
  std::atomic<bool> broken_{false};
  std::mutex words_mutex_;  // guards the next, and RankState::reason
  bool breaking_ = false;
  std::string reason_;  // not changed once broken_ is true
};

}  // namespace lockstep::internal::shm
