#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

// Puts threads to sleep on a word of memory that several processes map
// (futex(2), without FUTEX_PRIVATE_FLAG).
namespace lockstep::internal {

// Sleeps if `word` is `expected`, until futex_wake_all() wakes the thread or
// `allowed` (more than 0) has passed. May return early: the caller must look
// again at what it waits for. `bits` (not 0) says what the thread sleeps for;
// the callers that share the word define what each bit means.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds allowed, uint32_t bits);

// Wakes all threads that sleep on `word` with at least one of `bits`.
void futex_wake_all(const std::atomic<uint32_t>& word, uint32_t bits);

}  // namespace lockstep::internal
