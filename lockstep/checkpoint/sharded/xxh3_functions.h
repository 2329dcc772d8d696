#pragma once

#include <stddef.h>
#include <stdint.h>

// The functions of xxHash, compiled for several instruction sets. This header
// includes no C++ header: an inline function of one, compiled for AVX2, could
// end up in the whole program.
namespace lockstep::internal {

struct Xxh3Functions {
  uint64_t (*hash)(const void* data, size_t size);
  // On a state of kXxh3StateSize bytes, aligned to 64 bytes.
  void (*reset)(void* state);
  void (*update)(void* state, const void* data, size_t size);
  uint64_t (*digest)(const void* state);
};

inline constexpr size_t kXxh3StateSize = 576;

extern const Xxh3Functions kXxh3Base;
// Only on x86-64, for processors that have AVX2.
extern const Xxh3Functions kXxh3Avx2;

}  // namespace lockstep::internal
