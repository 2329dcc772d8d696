#pragma once

#include <cstddef>

namespace lockstep::shm {

// Where one algorithm takes over from another (docs/shared-memory.md). One set
// for all ranks of a group: rank 0's. In bytes.
struct Tuning {
  // A contribution of up to this many bytes is written beside its
  // announcement, and every rank reduces all of them: one synchronisation.
  // Multiple of 64.
  size_t one_shot_bytes;
  // What is larger goes through staging memory in chunks of this size a rank
  // (of a quarter of it up to half of it): two synchronisations a chunk, each
  // rank reduces its slice. Multiple of 4,096.
  size_t chunk_bytes;
  // Results of at least this size that are not read in the same operation go
  // past the caches.
  size_t streaming_bytes;
};

// What was measured to be good for `ranks` ranks on one host.
Tuning default_tuning(int ranks);

// Throws std::invalid_argument with what is wrong.
void check(const Tuning& tuning);

}  // namespace lockstep::shm
