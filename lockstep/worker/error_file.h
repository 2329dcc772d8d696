#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

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
// is for `lockstep run` (launch/watch/worker_failure.h).
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

// Tells the launcher where a process was when a fatal signal ended it. From
// this call on, a thread that gets SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT
// writes its native stack to the file "stack.txt" beside the error file
// (TORCHELASTIC_ERROR_FILE), and the error file itself if no failure was noted:
//
//   {"message": {"message": "SIGSEGV at address 0x10", "extraInfo": {...}}}
//
// The words of a signal that was sent have the number of the sender instead.
// Then the signal ends the process as it would have. A signal that the program
// handles or ignores is left alone, as are all if there is no error file. The
// handler runs on a stack of its own in the thread that calls this, so that an
// overflow of its stack is seen too. To name the frames it takes locks of the
// loader, which the thread that crashed may have: if the handler takes longer
// than 10 s, SIGALRM ends the process. May be called again.
void arm_crash_handler();

// Returns the frames of "stack.txt" beside `error_file`, as frame_line() writes
// them (native_stack.h), without those of the handler; empty if there is no
// such file.
std::vector<std::string> read_crash_stack(
    const std::filesystem::path& error_file);

}  // namespace lockstep::internal
