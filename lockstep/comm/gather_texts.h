#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::internal {

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
// Blocks until all have come or the deadline has passed; a rank that comes in
// the last moment counts. Asks the store again and again, because LibTorch
// prints a warning of its own if Store::wait() times out. `look`, if given, is
// called after each of these questions, also after the last one. What it throws
// ends the wait.
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

// Waits, for a second at most, until the counter `key` has reached `ranks`:
// each rank that hears of a failure adds one. A rank that left before this
// could take the store with it. Errors of the store pass through.
void wait_until_told(c10d::Store& store, const std::string& key, int64_t ranks);

}  // namespace lockstep::internal
