#pragma once

#include <cstddef>
#include <string_view>

namespace lockstep::shm {

// Where one algorithm takes over from another (docs/shared-memory.md). All
// ranks of a group use those of rank 0. In bytes.
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
// "one_shot_bytes=4096,chunk_bytes=131072". Throws std::invalid_argument.
Tuning parse_tuning(std::string_view text, const Tuning& defaults);

// Returns what a group of `ranks` uses: LOCKSTEP_TUNING in the form of
// parse_tuning(), and default_tuning() for what that leaves out. Throws
// std::invalid_argument.
Tuning choose_tuning(int ranks);

// Throws std::invalid_argument if a threshold is out of its range.
void check(const Tuning& tuning);

}  // namespace lockstep::shm
