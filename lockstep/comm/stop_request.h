#pragma once

// Ends a training after a step on which all ranks agree, with a last snapshot,
// when it must end: a scheduler takes the machine back, or the user types
// Ctrl-C.
//
//   for (auto& batch : loader) {
//     ...  // one step
//     if (lockstep::stop_requested()) {
//       save_snapshot(...);
//       break;
//     }
//   }
//   return lockstep::stop_exit_code();  // from main()
//
// Nothing here needs `lockstep run`, which forwards such a signal to all ranks
// and gives them 30 s (docs/launcher.md, "Signals"). A SnapshotSaver, which
// decides when to save, too, has a stop_requested() of its own.
namespace lockstep {

// Returns whether the training is to stop: whether SIGTERM, SIGINT, SIGHUP or
// SIGQUIT has come to any rank, or any rank has called request_stop(). (If
// `lockstep run --signals-to-handle` is given, the signals are instead SIGTERM
// and those that it names.) All ranks get the same answer in the same call, and
// true ever after.
//
// A collective of the default group: all ranks call it equally often, at the
// same place, such as the end of each step. It reduces one number, on the CPU
// if the group has a backend for it; without one it waits for the device. Once
// it has returned true it exchanges nothing more. Without a process group it is
// about this process alone. Throws as all_reduce() does.
//
// The first call catches those of the signals that have their default
// action; before it, they end the process. A signal that the program handles or
// ignores is left alone; its handler may call request_stop(). A second SIGINT
// or SIGQUIT, which come from a terminal, ends the process; a second SIGTERM
// changes nothing. In a child process that is forked later the signals
// do what they would otherwise.
bool stop_requested();

// Does what SIGTERM does: the next stop_requested() returns true on all ranks.
// For signal handlers of the program, and for limits of time. Any thread and
// any signal handler may call it.
void request_stop() noexcept;

// Returns what main() should return after the training: 128 + the signal for
// which stop_requested() has returned true, the highest of several, equal on
// all ranks. Returns 0 if it has not.
int stop_exit_code() noexcept;

}  // namespace lockstep
