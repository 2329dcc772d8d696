#pragma once

#include <optional>
#include <string>

#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/check_in.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/life_signs.h"

namespace lockstep::internal {

// Where, and as which rank, a process joins its world: what an init_method
// resolves to. `store` is shared by all ranks and holds the check-in.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int world_size;
  // None if the ranks are not counted (a file, a given store).
  std::optional<CheckIn> check_in{};
  // The store for the groups: `store`, or another connection to it. It has a
  // prefix of its own for this join if a launcher keeps the store and an
  // earlier join has used it (see CheckIn::groups_prefix).
  c10::intrusive_ptr<c10d::Store> group_store{};
  // Whether rank 0 hosts the store (and not a launcher, or a file).
  bool hosted_by_rank_zero = false;
  // Whether the launcher keeps the store for this attempt (LauncherStore), so
  // that it outlives every rank.
  bool kept_by_launcher = false;
  // If the ranks meet at rank 0's store, though the launcher keeps one: the
  // launcher's, at which this rank has said so.
  c10::intrusive_ptr<c10d::Store> launcher_store{};
  // Why this rank may not go on, which the others that have come must be told:
  // another process called itself a rank that it may not be, or the file was
  // used before.
  std::optional<std::string> refusal{};

  // Returns the ranks that have not checked in, "2, 5"; empty if there are none
  // or they are not known. For the message of a failed start.
  std::string absent_ranks() const;

  // Remembers this store, so that the next join does not mistake it for its
  // own. Call it after the groups are made (or could not be made): earlier,
  // rank 0 may have opened the store and not have marked it yet. Throws
  // nothing.
  void remember_host() const;

  // Whether the ranks wait for each other in part(), after a success: not if
  // the store is a file, was given, or is hosted by torchrun.
  bool has_parting() const { return hosted_by_rank_zero || kept_by_launcher; }

  // The last call before the store is released: rank 0 keeps a store that it
  // hosts until the others have left it; in a store that the launcher keeps,
  // the ranks wait for each other alike, for the sake of their connections, but
  // not after a failure (`life_signs` is null). Returns whether that is over
  // (CheckIn::part). Throws nothing.
  bool part(LifeSigns* life_signs, const Deadline& deadline) const;
};

// Resolves `options` (see InitProcessGroupOptions::init_method), connects to
// the store, and waits until all ranks have come. For env:// and tcp:// rank 0
// hosts the store, unless the launcher does, at its own address
// (TORCHELASTIC_USE_AGENT_STORE).
//
// With env:// the ranks meet at the store that `lockstep run` keeps
// (LOCKSTEP_STORE) if all of them are ours for certain: if `python_may_join` is
// false (backend_registry.h), or LOCKSTEP_WORKER_STORE is "agent"; and never if
// that is "tcp". A rank that decides otherwise than the first one is refused.
// Nothing waits for the other ranks then: making the groups does.
//
// Throws std::invalid_argument if two processes have one rank, or ranks
// disagree on the world size (both are named), and c10::DistError with the
// absent ranks at the timeout.
Rendezvous rendezvous(const InitProcessGroupOptions& options,
                      bool python_may_join);

// Does the same for ranks that a launcher has told their rank and world size.
// Rank 0 hosts the store: at loopback if all ranks are on one host, otherwise
// at the address by which it reaches other networks; MASTER_ADDR and
// MASTER_PORT name another address and port. Only the timeout of `options`
// counts.
Rendezvous rendezvous(const LaunchedWorld& world,
                      const InitProcessGroupOptions& options);

// Does the same for a world of which this process is the only one
// (BackendEntry::imagines_peers of `backend`): waits for nobody. Rank and world
// size are those of `options`, or else RANK and WORLD_SIZE, or else 0 and 1.
// Throws std::invalid_argument if there is no such rank, or if `options` name a
// place to meet.
Rendezvous imagined_rendezvous(const std::string& backend,
                               const InitProcessGroupOptions& options);

// Does the same for a process that takes the place of one that died, and joins
// the others later (reconfigure.h). `options` may name a place to meet, which
// is not used.
Rendezvous rendezvous_apart(const InitProcessGroupOptions& options);

// Connects to the store that the launcher keeps for this attempt. Throws
// std::invalid_argument if there is none, and c10::DistNetworkError.
c10::intrusive_ptr<c10d::Store> launcher_store(
    std::chrono::milliseconds timeout);

}  // namespace lockstep::internal
