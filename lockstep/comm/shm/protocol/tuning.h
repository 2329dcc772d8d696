#pragma once

#include <cstddef>

namespace lockstep::shm {

// The sizes at which one algorithm takes over from another
// (docs/shared-memory.md), in bytes. One set, rank 0's, holds for all ranks of
// a group.
struct Tuning {
  // A contribution of up to this many bytes is written beside its announcement,
  // and every rank reduces all of them: this needs one wait. A multiple of 64.
  size_t one_shot_bytes;
  // A larger contribution goes through staging memory in chunks of this size
  // (of a quarter of it, if the data is at most half of it), and each rank
  // reduces its slice: this needs two waits for each chunk. A multiple of
  // 4,096.
  size_t chunk_bytes;
  // Results of at least this size that are not read in the same operation are
  // written past the caches.
  size_t streaming_bytes;
};

// Returns thresholds that were measured to be good for `ranks` ranks on one
// host.
Tuning default_tuning(int ranks);

// Throws std::invalid_argument with what is wrong.
void check(const Tuning& tuning);

}  // namespace lockstep::shm
