#pragma once

#include <stdexcept>

#include "lockstep/base/process_mark.h"

namespace lockstep::internal::shm {

// Throws in a child that was forked after `made_in` was made. The child has
// copies of objects that stand for the parent's memory, which it must not write
// to.
inline void refuse_in_child(const ProcessMark& made_in) {
  if (!made_in.is_foreign()) return;
  throw std::runtime_error(
      "memory that ranks share is used in a process that was forked from a "
      "rank; use it in the rank itself only");
}

}  // namespace lockstep::internal::shm
