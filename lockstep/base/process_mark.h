#pragma once

#include <cstdint>

namespace lockstep {

// Remembers the process that made it, so that an object which stands for
// something outside (sockets, memory of several processes, threads) knows
// whether it is used in a child that was forked since. The child's copy of such
// an object must leave all that alone: it belongs to the parent.
//
// A value type. is_foreign() costs one relaxed load; safe in any thread.
// Children of fork() only: not of vfork() and clone(), after which a program
// may do nothing but exec.
class ProcessMark {
 public:
  ProcessMark();
  bool is_foreign() const noexcept;

 private:
  uint64_t forks_;
};

}  // namespace lockstep
