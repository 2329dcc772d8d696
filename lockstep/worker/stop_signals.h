#pragma once

#include <csignal>
#include <vector>

namespace lockstep::internal {

// Notices signals that ask a job to stop, instead of dying of them, as long as
// it lives. Several objects may catch one signal; the last of them gives it
// back. A signal that the program handles or ignores is left alone. Of SIGINT
// and SIGQUIT, which come from a terminal, only the first is caught, so that
// the second ends a program that does not stop. In a child that is forked later
// the signals do what they would otherwise. Threads: objects are made and
// destroyed one after another.
class StopSignals {
 public:
  // Throws std::invalid_argument for a number that is not a signal, and for
  // signals that cannot be caught or tell of a fault of the program.
  explicit StopSignals(std::vector<int> signals);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Whether one of these signals has come to this process while any object
  // caught it. It stays true for the objects that are made later: a process
  // that was told to stop stays told.
  bool have_come() const { return highest() != 0; }
  // Returns the highest of these signals that have come; 0 if none has.
  int highest() const;

  // Does what the signal does when it comes and is caught. Any thread and any
  // signal handler may call it.
  static void notice(int signal) noexcept;

 private:
  std::vector<int> signals_;
  std::vector<int> caught_;
};

}  // namespace lockstep::internal
