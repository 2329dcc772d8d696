#pragma once

#include <filesystem>
#include <string>
#include <vector>

// Tells the launcher where a process was when a fatal signal ended it.
namespace lockstep::internal {

// From this call on, a thread that gets SIGSEGV, SIGBUS, SIGFPE, SIGILL or
// SIGABRT writes its native stack to the file "stack.txt" beside the error file
// (TORCHELASTIC_ERROR_FILE), and the error file itself if no failure was noted:
//
//   {"message": {"message": "SIGSEGV at address 0x10", "extraInfo": {...}}}
//
// The words of a signal that was sent have the number of the sender instead.
// Then the signal ends the process as it would have. A signal that the program
// handles or ignores is left alone, as are all if there is no error file. The
// handler calls what a signal handler may call, and runs on a stack of its own
// in the thread that calls this, so that an overflow of its stack is seen too.
// If it takes longer than 10 s, SIGALRM ends the process. May be called again.
void arm_crash_handler();

// Returns the frames of "stack.txt" beside `error_file`, as frame_line() writes
// them (native_stack.h), without those of the handler; empty if there is no
// such file.
std::vector<std::string> read_crash_stack(
    const std::filesystem::path& error_file);

}  // namespace lockstep::internal
