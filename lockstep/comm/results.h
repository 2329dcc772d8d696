#pragma once

#include <cstdint>

namespace lockstep::internal {

// Which elements of a bucket hold the reduced values after a reduction; the
// others are undefined.
enum class Results : uint8_t {
  everywhere,  // all, on every rank: an all-reduce
  owned,       // those that the rank owns: a reduce-scatter in place
};

}  // namespace lockstep::internal
