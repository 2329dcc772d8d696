#pragma once

#include <exception>
#include <string>

namespace lockstep::internal {

// If `error` says that the system gave no memory (std::bad_alloc, or the
// c10::Error of LibTorch's allocator for the CPU), returns one line with the
// bytes that were wanted, as far as `error` has them, the highest memory use of
// this process, the limits that are set for it, and what helps. Otherwise
// returns an empty string. Any thread may call.
std::string out_of_memory_words(const std::exception& error);

}  // namespace lockstep::internal
