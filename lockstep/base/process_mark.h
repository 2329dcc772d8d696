#pragma once

#include <cstdint>

namespace lockstep::internal {

// Remembers the process that made it. An object that stands for something
// outside the process's own memory (sockets, memory of several processes,
// threads) can thus see whether it is used in a child that was forked later.
// The child's copy of such an object must leave all of that alone: it belongs
// to the parent.
//
// A value type. is_foreign() costs one relaxed load; safe in any thread. Only
// children of fork() are noticed, not those of vfork() and clone(), after which
// a program may do nothing but exec.
class ProcessMark {
 public:
  ProcessMark();
  bool is_foreign() const noexcept;

 private:
  uint64_t forks_;
};

}  // namespace lockstep::internal
