// The body of xxh3_base.cpp and xxh3_avx2.cpp, which define LOCKSTEP_XXH3 as
// the name of their functions. All of xxHash's code is inlined here, so a
// program needs no library for it.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "lockstep/checkpoint/sharded/xxh3_functions.h"

namespace lockstep::internal {
namespace {

static_assert(sizeof(XXH3_state_t) <= kXxh3StateSize);

uint64_t hash(const void* data, size_t size) { return XXH3_64bits(data, size); }
void reset(void* state) {
  XXH3_64bits_reset(static_cast<XXH3_state_t*>(state));
}
void update(void* state, const void* data, size_t size) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, size);
}
uint64_t digest(const void* state) {
  return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state));
}

}  // namespace

extern const Xxh3Functions LOCKSTEP_XXH3{hash, reset, update, digest};

}  // namespace lockstep::internal
