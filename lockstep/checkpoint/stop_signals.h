#pragma once

#include <csignal>
#include <vector>

namespace lockstep::internal {

// Notices signals that ask a job to stop, instead of dying of them, as long as
// it lives. A signal that the program handles or ignores is left alone. The
// handlers are the process's: objects must be made and destroyed one after
// another, in any thread.
class StopSignals {
 public:
  // Throws std::invalid_argument for a number that is no signal or one that
  // cannot be caught.
  explicit StopSignals(const std::vector<int>& signals);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Whether one has come to this process since the oldest living object was
  // made. Any thread may ask.
  static bool have_come();

 private:
  std::vector<int> caught_;
};

}  // namespace lockstep::internal
