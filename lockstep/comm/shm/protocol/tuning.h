#pragma once

#include <cstddef>
#include <string_view>

namespace lockstep::internal::shm {

// The sizes at which one algorithm takes over from another
// (docs/internals/shared-memory.md), in bytes. One set, rank 0's, holds for all
// ranks of a group.
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

// The caches of one core, in bytes. The last level may be shared by all.
struct CacheSizes {
  size_t level1;
  size_t level2;
  size_t last;
};

// Returns the sizes that the C library reports, and common ones for those that
// it does not know.
CacheSizes cache_sizes();

// Returns the thresholds that suit these caches and `ranks` ranks on one host.
Tuning default_tuning(int ranks, const CacheSizes& caches = cache_sizes());

// Returns `defaults` with the thresholds that `text` names replaced:
// "one_shot_bytes=4096,chunk_bytes=131072", for groups of `ranks`. Throws
// std::invalid_argument.
Tuning parse_tuning(std::string_view text, const Tuning& defaults,
                    int ranks = 1);

// Returns what a group of `ranks` uses: LOCKSTEP_TUNING in the form of
// parse_tuning(), and default_tuning() for what that leaves out. Throws
// std::invalid_argument.
Tuning choose_tuning(int ranks);

// Throws std::invalid_argument if a threshold is out of its range for groups of
// `ranks`.
void check(const Tuning& tuning, int ranks = 1);

}  // namespace lockstep::internal::shm
