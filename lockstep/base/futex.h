#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

// Sleeping on a word of memory that several processes map (futex(2), without
// FUTEX_PRIVATE_FLAG).
namespace lockstep {

// Sleeps while `word` is `expected`, until it is woken or `allowed` has passed
// (more than 0). May return early: the caller looks again at what it waits for.
// `bits`, not 0: what it sleeps for, in the meaning of whoever uses the word.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds allowed, uint32_t bits);

// Wakes all who sleep on `word` with one of `bits`.
void futex_wake_all(const std::atomic<uint32_t>& word, uint32_t bits);

}  // namespace lockstep
