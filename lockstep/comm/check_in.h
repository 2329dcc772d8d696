#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/last_words.h"
#include "lockstep/comm/life_signs.h"

namespace lockstep::internal {

// The messages of ranks of Lockstep to each other in the store before their
// groups are made and after these are destroyed: which ranks have come, and
// that all agree on the world. Python ranks write no such keys, so they are not
// checked and not waited for.
//
// Keys, after `prefix` (round_prefix()):
//   world_size   that of the first rank that came
//   rank/R       how many processes call themselves rank R
//   refused      why a rank may not join, for the rank that hosts the store
//   host         a random number of the rank that hosts the store (mark_host())
//   left/R, parted, gone/R   the steps of part()
//
// May be copied. Errors of the store (c10::DistError) pass through unless said
// otherwise.
class CheckIn {
 public:
  // Returns the prefix of the keys of this join at a TCPStore. A launcher that
  // hosts the store (`agent_store`) keeps it over restarts, and while a program
  // joins again, so each join needs keys of its own. Counts the joins: call it
  // once for each.
  static std::string round_prefix(bool agent_store);

  CheckIn(c10::intrusive_ptr<c10d::Store> store, std::string prefix, int rank,
          int world_size);

  // Says that this rank has come. Throws std::invalid_argument if another
  // process has the same rank, or another rank another world size; both are
  // named.
  void announce() const;

  // Waits until all ranks have come, for 50 ms at most: LibTorch looks only
  // every 10 ms, which is long for ranks that come at the same time, as standby
  // processes do. Throws c10::DistError if the store is gone.
  void await_briefly() const;

  // Where a rank that may not join tells the rank that hosts the store why.
  LastWords refusal() const { return {*store_, key("refused")}; }

  // Returns the world size of the first rank that came: the rank that hosts the
  // store waits for that many.
  int agreed_world_size() const;

  // Returns the ranks that have not come, "2, 5"; empty if there are none or
  // they are not known (because the store is gone, for example). Throws
  // nothing.
  std::string absent_ranks() const;

  // Rank 0 marks the store that it hosts with a random number. The other ranks
  // remember that number. When they join again, they can tell the next store
  // from one that is still being closed, or that an exception left open.
  void mark_host() const;
  void remember_host() const;
  // Returns false if this is the store of the previous join. Blocks until the
  // mark is set, for two seconds at most: a Python rank 0 writes none.
  bool is_new_host(const Deadline& deadline) const;

  // Returns the prefix of the keys of this join's groups, the same on every
  // rank. In a store that a launcher keeps, the groups of one join must not
  // meet the keys of another. The first join in a store has the empty prefix,
  // because Python's groups have none and Python ranks may belong to the groups
  // of that join.
  std::string groups_prefix() const;

  // The last call before this rank releases a store that rank 0 hosts: rank 0
  // keeps the store until the others have left it. Returns whether that is
  // over; false if the deadline was first, and then it may be called again. It
  // is also over as soon as `life_signs` knows a rank that died or failed,
  // because then no rank waits for another; without `life_signs` (null) such a
  // rank is not noticed. Throws nothing.
  bool part(LifeSigns* life_signs, const Deadline& deadline) const;

 private:
  std::string key(const char* what) const;
  std::string key(const char* what, int of) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  int rank_;
  int world_size_;
};

}  // namespace lockstep::internal
