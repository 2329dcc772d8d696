#pragma once

#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/life_signs.h"

namespace lockstep {

// What ranks of Lockstep tell each other in the store before and behind their
// groups: who is there, and that all agree on the world. Python ranks write no
// such keys; they are not checked and not waited for.
//
// Keys, behind `prefix` (round_prefix()):
//   world_size   of the first that came
//   rank/R       how many call themselves R
//   refused      why a rank may not join, for the host of the store
//   host         a number of the host's own (see is_new_host)
//   left/R, parted, gone/R   the end (see part)
//
// A value; may be copied. Errors of the store (c10::DistError) pass through
// unless said otherwise.
class CheckIn {
 public:
  // What keys of this round stand behind: a launcher that keeps the store
  // (`agent_store`) keeps it over restarts and over the rounds of a program
  // that joins again. Counts rounds: once for each join.
  static std::string round_prefix(bool agent_store);

  CheckIn(c10::intrusive_ptr<c10d::Store> store, std::string prefix, int rank,
          int world_size);

  // Throws std::invalid_argument if another rank has this one's number or
  // another world size; both are named.
  void announce() const;

  // From a rank that may not join: the host of the store reads why.
  void refuse(const std::string& reason) const;
  std::optional<std::string> refusal() const;

  // How many ranks the host waits for, by the first that came.
  int agreed_world_size() const;

  // "2, 5": the ranks that are not there; empty if none or unknown (the store
  // is gone, say). Throws nothing.
  std::string absent_ranks() const;

  // Rank 0 marks the store that it hosts with a number of its own; the others
  // remember it, so as not to take a store that is being closed, or was left
  // by an exception, for the next one when they join again.
  void mark_host() const;
  void remember_host() const;
  // False if this is the store of the round before. Blocks for the mark, for
  // two seconds at most: a Python host writes none.
  bool is_new_host(const Deadline& deadline) const;

  // In a store that a launcher keeps, groups of one round must not meet the
  // keys of another. Python takes the store as it is; so do the groups of the
  // round that comes first, and Python ranks can stand in them. The result is
  // what the groups of this round stand behind, the same on every rank; empty
  // for that first one.
  std::string groups_prefix() const;

  // The last thing before a store is released that rank 0 hosts: it stays
  // until the others have left it. Returns whether that is over; false if the
  // time was, and it may be called again. Over it is, too, as soon as a rank
  // has died or failed (null: that is not known); nobody waits for anybody
  // then. Throws nothing.
  bool part(LifeSigns* life_signs, const Deadline& deadline) const;

 private:
  std::string key(const char* what) const;
  std::string key(const char* what, int of) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  int rank_;
  int world_size_;
};

}  // namespace lockstep
