#pragma once

// Lets a program end the waits of its threads from outside: Python's Ctrl-C,
// which a signal handler only notes, and which the thread that waits must ask
// for.
namespace lockstep::internal {

// A function that is called in a thread that waits for other ranks, some twenty
// times a second. If it throws, the wait ends with its exception (a
// std::exception), and a collective that has begun fails on all ranks.
using InterruptionCheck = void (*)();

// Sets the function for the whole process; null, the default, means none. Any
// thread may call, before it waits.
void set_interruption_check(InterruptionCheck check) noexcept;

// Calls the function, if there is one. Threads of the library call it, too.
void check_interruption();

// The longest sleep of a thread that calls check_interruption().
inline constexpr int kInterruptionSliceMs = 50;

}  // namespace lockstep::internal
