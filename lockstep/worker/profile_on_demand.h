#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace lockstep::internal {

// How far a profile has come that was asked for from outside.
enum class ProfileState : int32_t {
  none,
  waiting,  // for the next step of the training
  recording,
  written,
  failed,
};

// The profiler of this process for those who ask for a profile from outside
// (`lockstep profile`). The layer that has a profiler provides one; this layer
// asks it and calls it at each step.
class ProfileOnDemand {
 public:
  struct Progress {
    ProfileState state = ProfileState::none;
    // The name of the file that was written, in Request::folder, or why there
    // is none.
    std::string words{};
  };

  virtual ~ProfileOnDemand() = default;

  struct Request {
    std::string folder{};  // for the trace
    // How long to record, at least, in whole steps.
    std::chrono::milliseconds duration{};
    // The first step to record, by TrainingCounters::steps(): all ranks begin
    // with the same one, unless they are past it already.
    int64_t first_step = 0;
  };
  // Any thread; does not block.
  virtual void ask(Request request) = 0;
  // Ends the profile that was asked for: with the next step if it is being
  // recorded, so that what was recorded is written; at once if it waits for its
  // first step. Any thread; does not block.
  virtual void stop() = 0;
  virtual Progress progress() const = 0;  // any thread
  // Step `step` begins in the thread that calls this, which is the one that
  // trains. May block to write the trace.
  virtual void on_step(int64_t step) noexcept = 0;
  // The training has ended: write what was recorded so far, if the calling
  // thread is the one that trained. Any thread.
  virtual void end() noexcept = 0;

  // `profiler` lives until the process ends. Any thread.
  static void provide(ProfileOnDemand* profiler) { provided_ = profiler; }
  static ProfileOnDemand* provided() { return provided_; }  // or null

  // Whether on_step() has something to do. Costs one relaxed load.
  static bool is_wanted() { return wanted_.load(std::memory_order_relaxed); }

 protected:
  static void set_wanted(bool wanted) { wanted_ = wanted; }

 private:
  static inline std::atomic<ProfileOnDemand*> provided_{nullptr};
  static inline std::atomic<bool> wanted_{false};
};

}  // namespace lockstep::internal
