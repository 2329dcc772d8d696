#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

// Sleeping on a word of memory that several processes map (futex(2), without
// FUTEX_PRIVATE_FLAG).
namespace lockstep {

// Sleeps while `word` is `expected`, until it is woken or `allowed` has passed
// (more than 0). May return early: the caller looks again at what it waits for.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds allowed);

// Wakes all who sleep on `word`.
void futex_wake_all(const std::atomic<uint32_t>& word);

}  // namespace lockstep
