#pragma once

#include <cstddef>

namespace lockstep::kernels {

// How results are written. `streaming` goes past the caches, which spares
// reading the lines that are overwritten: for what is larger than the caches
// and not read again soon. Ends with a store fence (sfence), so that a release
// store that follows publishes what was streamed.
enum class Stores { cached, streaming };

// memcpy. Nothing overlaps. Throws nothing; thread-safe.
void copy(void* destination, const void* source, size_t bytes,
          Stores stores = Stores::cached);

}  // namespace lockstep::kernels
