#pragma once

#include <optional>
#include <string>

#include "lockstep/comm/check_in.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/launched_world.h"
#include "lockstep/comm/life_signs.h"

namespace lockstep {

// Where and as whom a process joins its world: what an init_method resolves
// to. `store` is shared by all ranks and holds the check-in.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int world_size;
  // None where nobody counts the ranks (a file, a given store).
  std::optional<CheckIn> check_in{};
  // What groups are to build on: `store`, or another connection to it; behind
  // a prefix of this round where a launcher keeps the store and an earlier
  // round has used it (see CheckIn::groups_prefix).
  c10::intrusive_ptr<c10d::Store> group_store{};
  // Whether rank 0 hosts the store (and not a launcher, or a file).
  bool hosted_by_rank_zero = false;
  // Why this rank may not go on, which the others that have come must hear:
  // another process called itself a rank that it may not be, or the file was
  // used before.
  std::optional<std::string> refusal{};

  // "2, 5": the ranks that have not checked in; empty if none or unknown. For
  // the message of a failed start.
  std::string absent_ranks() const;

  // So that the next round does not take this store for its own. Once the
  // groups stand (or could not be made): before, rank 0 may have opened the
  // store and not have marked it yet. Throws nothing.
  void remember_host() const;

  // The last thing before the store is released: rank 0 keeps a store that it
  // hosts until the others have left it. Returns whether that is over
  // (CheckIn::part). Throws nothing.
  bool part(LifeSigns* life_signs, const Deadline& deadline) const;
};

// Resolves `options` (see InitProcessGroupOptions::init_method), connects to
// the store (rank 0 hosts it for env:// and tcp:// unless the launcher does, at
// its own address: TORCHELASTIC_USE_AGENT_STORE), and waits until all ranks are
// there.
//
// Refuses two ranks of one number and ranks that disagree on the world size
// (std::invalid_argument, both named), and names the absent ranks at the
// timeout (c10::DistError).
Rendezvous rendezvous(const InitProcessGroupOptions& options);

// The same for ranks that a launcher has told their places: rank 0 hosts the
// store, at loopback where all are on one host, else at the address that it
// reaches other networks by; MASTER_ADDR and MASTER_PORT name others. Of
// `options` only the timeout counts.
Rendezvous rendezvous(const LaunchedWorld& world,
                      const InitProcessGroupOptions& options);

}  // namespace lockstep
