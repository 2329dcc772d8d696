#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// Tells which ranks of the default group are gone, for waits that nothing else
// would end before their deadline: above all, waits for keys in the store.
//
// Each rank binds a datagram socket to a random abstract name (unix(7)) and
// writes the name to the store. The kernel closes the socket when the process
// ends, however it ends. A rank asks about a peer by connecting a socket of its
// own to that name, which neither blocks nor needs the peer to do anything: a
// stopped process still has its name. A rank that leaves without dying binds
// that name with "-left" or "-failed" appended, until its process ends.
//
// This works for ranks of Lockstep on this host and in this network namespace.
// Nothing is ever said about other ranks.
//
// Key, in the default group's own part of the store: "alive/RANK", with the
// value "here HOST NAME", later "left" or "failed".
//
// Threads: any. No call waits for a peer. gone() and leave() may call the
// store, and wait for its answer for a second at most: a peer about which it
// does not answer is not known, or has died. learn_all() waits as long as the
// store does.
class LifeSigns {
 public:
  // How a rank ends its part in the world.
  enum class End {
    died,    // its process ended without a word
    failed,  // it left because of an error
    left,    // it left normally
  };
  struct Gone {
    int rank;
    End end;
    std::string words;  // "died"
  };

  // How long the last words of a rank may be on their way to a store that does
  // not answer a write, as c10d's TCPStore.
  static constexpr std::chrono::milliseconds kGrace{100};

  // The default group has `size` ranks. `rank_zero_has_store`: the store goes
  // with rank 0, so the store is not asked once rank 0 is gone (LibTorch would
  // print a warning). `grace`: kGrace, or 0 if the store answers each write,
  // so that it has what a rank writes before the rank goes on. Writes to the
  // store, whose errors (c10::Error) pass through. Throws std::system_error if
  // the system gives no socket.
  LifeSigns(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
            bool rank_zero_has_store, std::chrono::milliseconds grace = kGrace);
  LifeSigns(const LifeSigns&) = delete;
  LifeSigns& operator=(const LifeSigns&) = delete;

  // Returns those of `ranks` that have been gone for `grace` at least, in the
  // order of `ranks`. What such a rank wrote before it went is in the store by
  // then.
  std::vector<Gone> gone(const std::vector<int>& ranks);
  // The same for all ranks.
  std::vector<Gone> gone();
  // Does the same as gone(), but waits, for `grace` at most, until it is
  // certain about the ranks that seem to be gone.
  std::vector<Gone> gone_for_good(const std::vector<int>& ranks);
  std::vector<Gone> gone_for_good();
  // Returns whether one of `ranks` is gone, as far as this rank can tell
  // without the store. Waits for nothing, not even for a lock: while another
  // thread is in a call, nothing is known.
  bool misses_any(const std::vector<int>& ranks);

  // Reads from the store, after all ranks have come, where to look for each of
  // them: so this is still known when the store is gone.
  void learn_all();
  // Returns whether learn_all() has found a sign of every rank, so that none is
  // Python's.
  bool has_all();

  // Says how this rank ends its part. From then on it is gone for the others.
  // Only the first call counts. Throws nothing: if the store is gone, the peers
  // see a death.
  void leave(End end);

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    std::string socket{};  // empty if it is not known yet
    bool unknowable = false;
    std::optional<End> end{};
    Clock::time_point asked{};  // when the store was asked for `socket`
    std::optional<Clock::time_point> missed{};
  };

  std::string key(int rank) const;
  std::vector<int> everyone() const;
  // Calls `call` with the store, on a thread of its own. Returns whether it has
  // ended well within kAnswer; it goes on if it has not. The call before must
  // have ended.
  bool call_store(std::function<void(c10d::Store&)> call);
  // Whether the last call ends within this time.
  bool is_answered(std::chrono::milliseconds patience) const;
  // Returns the values of those ranks whose keys the store has.
  std::map<int, std::string> said_by(const std::vector<int>& ranks);
  void take_late_answer();
  void take_in(Peer& peer, const std::string& said);
  void learn_names(const std::vector<int>& ranks, Clock::time_point now);
  void learn(Peer& peer, int rank, Clock::time_point now);
  std::optional<End> end_of(const Peer& peer, int rank);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const bool rank_zero_has_store_;
  const std::chrono::milliseconds grace_;
  const ProcessMark made_in_;
  std::mutex mutex_;
  FileDescriptor socket_;
  FileDescriptor ended_socket_;  // bound to the name with "-left" or "-failed"
  std::string name_;
  std::string identity_;  // of this host; empty if it has none
  std::vector<Peer> peers_;
  std::future<void> call_;  // the last call_store(), which may be under way
  // The answer to the last question of said_by(); null if it was taken.
  // Shared with the call.
  std::shared_ptr<std::map<int, std::string>> answer_;
  bool store_failed_ = false;
  bool has_all_ = false;
};

// Returns "rank 2 died; rank 3 left because of an error"; empty if none is
// gone.
std::string words_of(const std::vector<LifeSigns::Gone>& gone);

}  // namespace lockstep::internal
