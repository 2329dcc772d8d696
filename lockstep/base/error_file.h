#pragma once

#include <string_view>

// Why this process fails, for the launcher that started it: the file that
// TORCHELASTIC_ERROR_FILE names, in the form that Python's @record writes
// (torch.distributed.elastic.multiprocessing.errors):
//
//   {"message": {"message": "RuntimeError: ...",
//                "extraInfo": {"timestamp": "1763800000",
//                              "time_ns": "1763800000123456789",
//                              "py_callstack": "the message again",
//                              "kind": "cause"}}}
//
// torchrun reads "timestamp" as an integer and prints "py_callstack"; the rest
// is for `lockstep run` (launch/worker_failure.h).
namespace lockstep {

// In the order in which the launcher reports failures.
enum class FailureKind {
  // This process failed by itself.
  cause,
  // The same, but what went wrong is known only to the program. Written as
  // "cause".
  cause_without_words,
  // Not noted by anybody: the file is Python's, or there is none.
  unknown,
  // A peer failed before, and this process could not go on without it.
  echo,
};

// Writes the file: aside, then renamed, so that it is always whole. The first
// failure of the process counts: a later one is left out, except that words
// replace a cause_without_words. Does nothing where the variable is unset, or
// in a child that was forked since the first call. Any thread.
void note_failure(FailureKind kind, std::string_view message) noexcept;

// Whether something was noted, and not forgotten since.
bool failure_noted() noexcept;

// The process goes on well (it has joined a world anew): removes what
// note_failure() wrote.
void forget_failure() noexcept;

}  // namespace lockstep
