#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::internal {

// Asks a store again and again, because LibTorch prints a warning of its own if
// Store::wait() times out. Returns true as soon as `ask()` does, false if the
// deadline passes before; a rank that comes in the last moment counts. An
// exception of `ask` ends the wait. The pause between two questions grows to
// `longest_pause`.
template <typename Ask>
bool poll_store(
    const Deadline& deadline, Ask ask,
    std::chrono::microseconds longest_pause = std::chrono::milliseconds(5)) {
  for (std::chrono::microseconds pause{50};;
       pause = std::min(2 * pause, longest_pause)) {
    const bool late = deadline.expired();
    if (ask()) return true;
    if (late) return false;
    std::this_thread::sleep_for(pause);
  }
}

// Names the ranks that did not come: "rank 2, 5 did not come in time".
class RanksAbsent : public c10::DistBackendError {
 public:
  using DistBackendError::DistBackendError;
};

// Ranks that meet in a store, and this one's place among them.
struct StoreMembers {
  c10d::Store& store;
  int rank;
  // Each member's rank in the default group, for errors; as many as there are
  // members.
  const std::vector<int>& global_ranks;
};

// Writes `text` to the store for this rank. Returns the texts of all members,
// in their order. The keys are `prefix` and the number of the member; they must
// be new, and they stay in the store. It needs no backend: before a backend
// connects its ranks, this finds out which have come.
//
// Blocks in poll_store() until all have come or the deadline has passed.
// `look`, if given, is called after each question, also after the last one.
// An exception of `look` ends the wait.
//
// Throws RanksAbsent, whose text has no times. Errors of the store
// pass through: a WatchedStore throws PeerGone soon after a rank has died or
// left.
std::vector<std::string> gather_texts(const StoreMembers& members,
                                      const std::string& prefix,
                                      const std::string& text,
                                      const Deadline& deadline,
                                      const std::function<void()>& look = {});

// Whether a rank has written to `key`. False if it cannot come any more.
bool has_come(c10d::Store& store, const std::string& key);

}  // namespace lockstep::internal
