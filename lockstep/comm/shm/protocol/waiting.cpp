#include "lockstep/comm/shm/protocol/waiting.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <fstream>

#include "lockstep/base/futex.h"
#include "lockstep/base/interruption.h"
#include "lockstep/base/number_list.h"
#include "lockstep/comm/shm/protocol/errors.h"
#include "lockstep/comm/shm/protocol/standstill.h"

namespace lockstep::internal::shm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// How long a waiting thread yields its core before it sleeps. Peers that need
// the same core can run meanwhile, and then no system call is needed to wake
// this thread.
constexpr microseconds kYielding{1000};
// How often a thread offers its core to a rank that is on the same core before
// it sleeps. The scheduler takes the offer only if that rank has had less of
// the core lately.
constexpr int kOffers = 8;
// The longest sleep before the peers' sockets are looked at: the death of a
// process wakes no thread.
constexpr milliseconds kSlice{10};

thread_local bool helps = false;

// Returns how many whole cores the control group grants, or the most that there
// can be if it does not say.
int granted_cores() {
  std::ifstream limit("/sys/fs/cgroup/cpu.max");
  double quota = 0;
  double period = 0;
  if (limit >> quota >> period && period > 0) {
    return std::max(1, static_cast<int>(quota / period));
  }
  return CPU_SETSIZE;  // "max", or no such file
}

// Returns how many cores the ranks together may use.
int cores_of_all(const Segment& segment, int size) {
  int cores = 0;
  for (size_t word = 0; word < segment.state(0).cores.size(); ++word) {
    uint64_t together = 0;
    for (int rank = 0; rank < size; ++rank) {
      together |= segment.state(rank).cores[word];
    }
    cores += std::popcount(together);
  }
  return cores;
}

}  // namespace

Waiting::Waiting(const Segment& segment, const PeerLinks& links, int rank,
                 int size, std::vector<int> names)
    : segment_(segment),
      links_(links),
      rank_(rank),
      size_(size),
      names_(std::move(names)),
      // Spinning on a core that the awaited rank needs would only delay it.
      spins_(size <= std::min(cores_of_all(segment, size), granted_cores())) {}

Waiting::Helper::Helper() { helps = true; }
Waiting::Helper::~Helper() { helps = false; }

bool Waiting::yields() const { return !spins_ || helps; }

void Waiting::lengthen() {
  const auto limit = spin_limit_.load(std::memory_order_relaxed);
  spin_limit_.store(std::min(2 * limit, kMostSpinning),
                    std::memory_order_relaxed);
}

bool Waiting::shares_core() const {
  const int core = ::sched_getcpu();
  segment_.state(rank_).core.store(core, std::memory_order_relaxed);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ &&
        segment_.state(peer).core.load(std::memory_order_relaxed) == core) {
      return true;
    }
  }
  return false;
}

bool Waiting::yield_core(const Ready& ready, const Deadline& deadline) const {
  for (const auto end = Clock::now() + kYielding;
       Clock::now() < end && !deadline.expired();) {
    if (ready(std::memory_order_acquire)) return true;
    ::sched_yield();
  }
  return false;
}

bool Waiting::offer_core(const Ready& ready) {
  for (int i = 0; i < kOffers; ++i) {
    ::sched_yield();
    if (ready(std::memory_order_acquire)) return true;
  }
  return false;
}

bool Waiting::keep_core(const Ready& ready, const Deadline& deadline) {
  const auto limit = spin_limit_.load(std::memory_order_relaxed);
  const auto end = Clock::now() + std::chrono::nanoseconds(limit);
  while (Clock::now() < end && !deadline.expired()) {
    if (shares_core()) return offer_core(ready);
    for (int i = 0; i < kGlances; ++i) {
      if (ready(std::memory_order_acquire)) {
        lengthen();
        return true;
      }
      pause();
    }
  }
  spin_limit_.store(std::max(limit / 2, kLeastSpinning),
                    std::memory_order_relaxed);
  return false;
}

std::string Waiting::name(int rank) const {
  return "rank " + std::to_string(number(rank));
}

Waiting::Outcome Waiting::sleep(const Ready& ready, uint32_t bells,
                                const Deadline& deadline,
                                const std::function<void()>& look) {
  if (yields() ? yield_core(ready, deadline) : keep_core(ready, deadline)) {
    return Outcome::ready;
  }
  auto& own = segment_.state(rank_);
  while (true) {
    look();
    check_interruption();
    if (auto* call = BlockedCall::of_this_thread()) call->look();
    if (ready(std::memory_order_acquire)) return Outcome::ready;
    if (deadline.expired()) return Outcome::timed_out;
    // A thread that publishes first stores and then looks for sleepers. This
    // thread first says that it sleeps and then looks at what was stored. All
    // four operations are seq_cst, so at least one of the two threads sees what
    // the other did.
    const auto bell = own.doorbell.load(std::memory_order_seq_cst);
    if (bells & kCalls) {
      own.sleepers.fetch_add(1, std::memory_order_seq_cst);
      segment_.sleepers().fetch_add(1, std::memory_order_seq_cst);
    }
    if (bells & kMessages) {
      own.message_sleepers.fetch_add(1, std::memory_order_seq_cst);
    }
    if (!ready(std::memory_order_seq_cst)) {
      futex_wait(own.doorbell, bell,
                 std::clamp(deadline.remaining(), milliseconds(1), kSlice),
                 bells);
    }
    if (bells & kMessages) {
      own.message_sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (bells & kCalls) {
      segment_.sleepers().fetch_sub(1, std::memory_order_seq_cst);
      own.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (ready(std::memory_order_acquire)) return Outcome::ready;
  }
}

std::string Waiting::words_of(int rank) const {
  const auto& reason = segment_.state(rank).reason;
  // The peer's memory is not trusted to end with 0.
  return std::string(reason.data(), ::strnlen(reason.data(), reason.size()));
}

std::vector<Waiting::Departure> Waiting::departures() const {
  // Look for ranks that hung up first, and then read their last words, which
  // they wrote before.
  uint64_t gone = 0;
  for (int peer : links_.hung_up()) gone |= uint64_t{1} << peer;
  std::vector<Departure> all;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto left = segment_.state(peer).left.load(std::memory_order_acquire);
    if (left == RankState::kTold) {
      all.push_back({.rank = peer,
                     .well = false,
                     .failed = true,
                     .words = words_of(peer)});
    } else if (left == RankState::kFailed) {
      all.push_back({.rank = peer,
                     .well = false,
                     .failed = true,
                     .words = name(peer) + " " +
                              std::string(EndingWords::failed) + " " +
                              words_of(peer)});
    } else if (gone >> peer & 1) {
      const bool well = left == RankState::kLeft;
      // Pairs with the release in keep_cause().
      const bool has_cause =
          segment_.state(peer).has_cause.load(std::memory_order_acquire) != 0;
      all.push_back({.rank = peer,
                     .well = well,
                     .failed = false,
                     .words = has_cause
                                  ? words_of(peer)
                                  : name(peer) + " " +
                                        std::string(well ? EndingWords::left
                                                         : EndingWords::died)});
    }
  }
  return all;
}

void Waiting::wake_all() const {
  for (int rank = 0; rank < size_; ++rank) {
    auto& state = segment_.state(rank);
    if (state.sleepers.load(std::memory_order_seq_cst) == 0) continue;
    ring(state, kCalls);
  }
}

void Waiting::wake_everybody() const {
  for (int rank = 0; rank < size_; ++rank) {
    ring(segment_.state(rank), kCalls | kMessages);
  }
}

void Waiting::ring(RankState& state, uint32_t bells) {
  state.doorbell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(state.doorbell, bells);
}

void Waiting::break_down(const std::string& reason, uint32_t how) {
  {
    const std::lock_guard lock(words_mutex_);
    if (breaking_) return;
    breaking_ = true;
    reason_ = reason;
    // The peers of a rank that has left have been told so.
    if (!has_left()) {
      segment_.state(rank_).has_cause.store(0, std::memory_order_relaxed);
      write_reason(reason);
      // Pairs with the acquire in departures().
      segment_.state(rank_).left.store(how, std::memory_order_seq_cst);
    }
    // Pairs with the acquire in broken().
    broken_.store(true, std::memory_order_seq_cst);
  }
  wake_everybody();
}

void Waiting::keep_cause(const std::string& cause) {
  const std::lock_guard lock(words_mutex_);
  auto& own = segment_.state(rank_);
  if (breaking_ || own.has_cause.load(std::memory_order_relaxed) != 0) return;
  write_reason(cause);
  // Pairs with the acquire in departures().
  own.has_cause.store(1, std::memory_order_release);
}

// Peers read the words only after they have seen `left`, or the end of this
// rank's sockets, so the words may be changed before.
void Waiting::write_reason(const std::string& reason) {
  auto& words = segment_.state(rank_).reason;
  const size_t length = std::min(reason.size(), words.size() - 1);
  std::memcpy(words.data(), reason.data(), length);
  words[length] = 0;
}

void Waiting::leave() const {
  auto& left = segment_.state(rank_).left;
  uint32_t here = RankState::kHere;
  left.compare_exchange_strong(here, RankState::kLeft,
                               std::memory_order_seq_cst);
  wake_everybody();
}

void Waiting::throw_if_broken() const {
  if (broken()) throw GroupBroken(reason_);
  // Its sockets look as if all peers were gone.
  if (has_left()) {
    throw GroupBroken("this rank has left the group (it was destroyed)");
  }
}

bool Waiting::has_left() const {
  return segment_.state(rank_).left.load(std::memory_order_relaxed) ==
         RankState::kLeft;
}

}  // namespace lockstep::internal::shm
