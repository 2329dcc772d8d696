#pragma once

#include <string>
#include <string_view>

// Tells the launcher that started this process why the process failed, in the
// file that TORCHELASTIC_ERROR_FILE names. The file has the form that Python's
// @record writes (torch.distributed.elastic.multiprocessing.errors):
//
//   {"message": {"message": "RuntimeError: ...",
//                "extraInfo": {"timestamp": "1763800000",
//                              "time_ns": "1763800000123456789",
//                              "py_callstack": "the message again",
//                              "kind": "cause"}}}
//
// torchrun reads "timestamp" as an integer and prints "py_callstack"; the rest
// is for `lockstep run` (launch/worker_failure.h).
namespace lockstep::internal {

// Kinds of failure, in the order in which the launcher reports them.
enum class FailureKind {
  // This process failed by itself.
  cause,
  // This process failed by itself, but only the program knows what went wrong.
  // The file says "cause".
  cause_without_words,
  // note_failure() was not called: Python wrote the file, or there is none.
  unknown,
  // A peer failed before, and this process could not go on without it.
  echo,
};

// Writes the file under another name and then renames it, so that no reader
// sees a part of it. The first failure of the process counts. A later one is
// ignored, except that a failure of another kind replaces a
// cause_without_words. Of the message at most 64 KiB are kept. Writes nothing
// if the variable is unset, and does nothing in a child that was forked after
// the first call. Any thread.
void note_failure(FailureKind kind, std::string_view message) noexcept;

// Returns the message of the failure that was noted, if it was an echo.
// Otherwise returns "".
std::string noted_echo();

// Removes what note_failure() wrote, because the process goes on well: it has
// joined a world again.
void forget_failure() noexcept;

}  // namespace lockstep::internal
