#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/kernels/dtype.h"

// Copies, products and reductions over raw pointers, vectorised for the machine
// they run on (Highway chooses at run time; see supported_targets()).
namespace lockstep::internal::kernels {

// How results are written. `streaming` goes past the caches, which saves
// reading the cache lines that are overwritten: for data that is larger than
// the caches and not read again soon. It ends with a store fence (sfence), so
// that a release store that follows publishes what was streamed.
enum class Stores { cached, streaming };

// Copies like memcpy. The memory must not overlap. Throws nothing; thread-safe.
void copy(void* destination, const void* source, size_t bytes,
          Stores stores = Stores::cached);

// Writes destination[i] = source[i] * factor, rounded once: in float64 for
// float64, otherwise in float32, to which the factor is rounded first. For
// floating types only (is_floating). The destination may be the source;
// otherwise the memory must not overlap. Pointers are aligned to their element.
// Throws nothing; thread-safe.
void scale(void* destination, const void* source, size_t count, DType dtype,
           double factor, Stores stores = Stores::cached);

// The plain loop that scale() must equal bit by bit.
void scale_scalar(void* destination, const void* source, size_t count,
                  DType dtype, double factor);

// For i in [0, count):
//   result = sources[0][i] op sources[1][i] op ... , from left to right,
//   destinations[d][i] = result, for every d.
//
// The order is fixed, so equal inputs give equal bits on every rank and every
// instruction set, the same as reduce_scalar(): vectors run over i, never over
// sources. float16 and bfloat16 accumulate in float32 and are rounded once, to
// nearest even. avg divides the accumulated sum by sources.size(), once.
// Integers wrap. min and max: NaN wins over any number; of -0 and +0 min gives
// -0 and max +0. For boolean, product and min are "and", max is "or".
//
// A destination may be one of the sources (the same pointer); otherwise the
// memory must not overlap. Pointers are aligned to their element; 64 bytes are
// faster. There is at least one source and one destination, and at most 64 of
// each. `is_reducible(dtype, op)` must hold. Throws nothing; thread-safe.
void reduce(std::span<void* const> destinations,
            std::span<const void* const> sources, size_t count, DType dtype,
            ReduceOp op, Stores stores = Stores::cached);

// The plain loop that reduce() must equal bit by bit.
void reduce_scalar(std::span<void* const> destinations,
                   std::span<const void* const> sources, size_t count,
                   DType dtype, ReduceOp op);

// Returns the instruction sets that this machine can run, the best first, by
// Highway's names: "AVX3" (AVX-512), "AVX2", "SSE4", "SCALAR" (no vectors, the
// plain loops). While a ForcedTarget lives, only the forced one.
std::vector<std::string> supported_targets();

// Makes every kernel of the process use one target while it lives: for tests
// and measurements. Must not be nested, and no kernel may run in another thread
// while it is made or destroyed. Throws std::invalid_argument if `name` is not
// one of supported_targets().
class [[nodiscard]] ForcedTarget {
 public:
  explicit ForcedTarget(const std::string& name);
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;
  ~ForcedTarget();
};

}  // namespace lockstep::internal::kernels
