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

// Reports the failures of this process (record.h).

// Says which rank this process is, and which function returns whether this rank
// knows of peers that are gone. The function is called while the process ends,
// so it must wait for no lock and no peer.
void identify_process(int rank, bool (*misses_peers)());
// The process has another rank now.
void identify_process(int rank);

// From here on an exception that nobody catches is written for the launcher and
// printed in one line, "rank 3: ...". Then the terminate handler that the
// program had set is called, or the process aborts. May be called again.
// Threads: one at a time may call.
void report_uncaught();

// Writes `error` for the launcher, as record_error() says.
void note_exception(const std::exception& error) noexcept;

// Does this with the exception that is being handled, or with the words that
// there is none, and prints one line, "rank 3: ...".
void report_current_exception() noexcept;

}  // namespace lockstep::internal
