#pragma once

#include <string>
#include <vector>

#include "lockstep/base/file_descriptor.h"

// Healing (`lockstep run --standby N --heal`): when a worker dies, the others
// stay, and a standby process takes the dead worker's place. This is what
// workers and agents say to each other about it.
//
// The worlds that an attempt has one after the other are its *generations*,
// counted from 0. A worker says "heals" once its training can be healed, and
// keeps in the *memory of its place* what the process that may take its place
// must know. This memory outlives the worker: the agent made it and gives it to
// each process that gets the place. When a worker has failed, and all workers
// of its node have said "heals", the agent waits for a standby process,
// announces the next generation in the workers' store, and gives the place to
// that process. A worker whose group failed waits for the announcement; all
// workers then make their groups again. Another generation may be announced
// before that is done: it takes the place of this one. If the agent cannot
// heal, it ends the attempt, as without --heal.
//
// If a node is lost with its agent, the agent of a spare node announces a
// generation in which its workers take the places. Processes of the lost node
// that still run, because it was stopped or cut off, may not take part.
//
// With --heal=shrink the agent does not end the attempt if no standby process
// comes: it announces a generation without the places of the workers that
// failed. If a node is lost, and no spare node waits, the agent with the
// agents' store does so for the places of that node. A place is a rank of
// generation 0; the ranks of a generation are its places in ascending order,
// numbered from 0.
//
//   environment   LOCKSTEP_HEAL        "1" in the workers of a job that heals
//                 LOCKSTEP_GENERATION  in a worker that took the place of one
//                                      that died: the generation that was
//                                      announced for it
//                 LOCKSTEP_PLACE_MEMORY  the descriptor of the place's memory
//                                      and its inode, "9:123456"
//   on the standby socket (standby_place.h), from the worker
//                 "heals"              its training can be healed from now on
//                 "heals whole: WHY"   likewise, but not with fewer ranks
//                 "heals no more"      its training has ended, or cannot be
//                                      healed any more
//                 "generation G: rank R of N"  it makes its groups for
//                                      generation G, in which it has this rank
//   in the workers' store, written by the agents
//                 heal/A/generation/G  why generation G of attempt A begins, in
//                                      one line: "rank 1 failed: killed by
//                                      SIGKILL (exit code 137)". If places were
//                                      given up, now or earlier, another line
//                                      names those that are left: "places 0 and
//                                      2". The last names those whose workers
//                                      were lost: "lost place 1". A is
//                                      TORCHELASTIC_RESTART_COUNT. The agents
//                                      of several nodes take the next free G,
//                                      by compare_set. If the store was lost,
//                                      that of the spare node which takes the
//                                      place of its host writes those that the
//                                      next store lacks, likewise
//                 heal/A/ended         written by a worker whose training has
//                                      ended, and by its agent: nobody can take
//                                      a place then, or give one up
namespace lockstep::internal {

constexpr const char* kHealVariable = "LOCKSTEP_HEAL";
constexpr const char* kGenerationVariable = "LOCKSTEP_GENERATION";
constexpr const char* kPlaceMemoryVariable = "LOCKSTEP_PLACE_MEMORY";
constexpr const char* kStandbyHeals = "heals";
constexpr const char* kStandbyHealsWhole = "heals whole: ";
constexpr const char* kStandbyHealsNoMore = "heals no more";
constexpr const char* kStandbyGeneration = "generation ";

// Returns whether this process is a worker of a job that heals.
bool job_heals();

// Returns the generation that this worker joins: 0 if it was started with its
// attempt.
int generation_joined();

// Returns the key in the workers' store that says why `generation` begins.
std::string generation_key(int generation);

// The value of that key.
struct GenerationNotice {
  std::string cause{};        // one line
  std::vector<int> places{};  // in ascending order; empty if all are left
  std::vector<int> lost{};    // their workers take part no more
};
std::string text_of(const GenerationNotice& notice);
GenerationNotice generation_notice_of(const std::string& text);

// Returns the key that a worker whose training has ended writes.
std::string training_ended_key();

// Returns the memory of this worker's place: a file in memory (memfd_create)
// that is empty at first, and is as the worker before has left it if
// generation_joined() is not 0. It is inherited by nobody, and stays the
// caller's, who may call this once. Throws std::runtime_error if this process
// does not have it.
FileDescriptor take_place_memory();

// Says that this worker's training can be healed from now on, or that it has
// ended or cannot be healed any more. `why_whole`: why it cannot go on with
// fewer ranks, in up to 200 bytes; empty if it can. Does nothing in a process
// that is not a worker of a launch that heals or has standby processes.
void tell_agent_heals(bool heals, const std::string& why_whole = {});

// Says for which generation this worker makes its groups, and its rank there.
void tell_agent_generation(int generation, int rank, int world_size);

// ---- The agent's side ----

// Return the same for the workers of another attempt.
std::string generation_key(int attempt, int generation);
std::string training_ended_key(int attempt);

}  // namespace lockstep::internal
