#pragma once

#include <cstddef>
#include <functional>

namespace lockstep::internal {

// Calls task(0) ... task(count - 1), each once, on up to `threads` threads, of
// which this thread is one. Returns when all have ended. If tasks throw, no
// further ones are begun, and the exception of the first of them by number is
// thrown here.
void run_tasks(size_t count, size_t threads,
               const std::function<void(size_t)>& task);

// Returns how many threads read a snapshot: as many as there are cores, 4 at
// most. Nothing else runs while a program loads.
size_t reading_threads();

// Returns whether this host has more cores than ranks, so that a thread beside
// the one that trains does not take a rank's core.
bool has_spare_core();

}  // namespace lockstep::internal
