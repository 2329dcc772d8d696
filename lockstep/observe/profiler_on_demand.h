#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "lockstep/observe/profiler.h"
#include "lockstep/worker/profile_on_demand.h"

namespace lockstep::internal {

// Records with a Profiler what the thread that trains does, when `lockstep
// profile` asks for it.
class ProfilerOnDemand final : public ProfileOnDemand {
 public:
  static ProfilerOnDemand& instance();  // lives until the process ends

  void ask(Request request) override;
  void stop() override;
  Progress progress() const override;
  void on_step(int64_t step) noexcept override;
  void end() noexcept override;

 private:
  using Clock = std::chrono::steady_clock;

  void begin_profile(int64_t step);
  void end_profile();
  void finish(ProfileState state, std::string words);

  mutable std::mutex mutex_;  // for the next two
  Progress progress_{};
  Request request_{};
  std::atomic<bool> stops_{false};  // what is recorded ends with the next step

  std::mutex use_;  // for the members below
  std::unique_ptr<Profiler> profiler_{};
  std::thread::id thread_{};
  Clock::time_point ends_{};
  std::string file_{};
};

}  // namespace lockstep::internal
