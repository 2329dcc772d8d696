#pragma once

#include <cstddef>

namespace lockstep::internal::kernels {

// How results are written. `streaming` goes past the caches, which saves
// reading the cache lines that are overwritten: for data that is larger than
// the caches and not read again soon. It ends with a store fence (sfence), so
// that a release store that follows publishes what was streamed.
enum class Stores { cached, streaming };

// Copies like memcpy. The memory must not overlap. Throws nothing; thread-safe.
void copy(void* destination, const void* source, size_t bytes,
          Stores stores = Stores::cached);

}  // namespace lockstep::internal::kernels
