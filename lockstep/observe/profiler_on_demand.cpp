#include <malloc.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/comm/errors.h"
#include "lockstep/observe/profiler.h"
#include "lockstep/worker/profile_on_demand.h"

namespace lockstep::internal {
namespace {

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

  // For the members below. Recursive, because a Profiler's constructor calls
  // end().
  std::recursive_mutex use_;
  std::unique_ptr<Profiler> profiler_{};
  std::thread::id thread_{};
  Clock::time_point ends_{};
  std::string file_{};
};

// Ends what is recorded with the thread that trains. The Profiler writes its
// trace then, too, whichever of the two the thread destroys first.
class EndsWithThread {
 public:
  EndsWithThread() = default;
  ~EndsWithThread() {
    if (!made_in_.is_foreign()) ProfilerOnDemand::instance().end();
  }
  EndsWithThread(const EndsWithThread&) = delete;
  EndsWithThread& operator=(const EndsWithThread&) = delete;

 private:
  const ProcessMark made_in_{};
};

// More steps than are recorded before the time is over.
constexpr int64_t kManySteps = int64_t{1} << 40;

}  // namespace

bool provide_profiler_on_demand() {
  ProfileOnDemand::provide(&ProfilerOnDemand::instance());
  return true;
}

ProfilerOnDemand& ProfilerOnDemand::instance() {
  static ProfilerOnDemand& instance =
      *std::make_unique<ProfilerOnDemand>().release();
  return instance;
}

void ProfilerOnDemand::ask(Request request) {
  const std::lock_guard lock(mutex_);
  if (progress_.state == ProfileState::recording) return;  // another goes on
  progress_ = {ProfileState::waiting, {}};
  request_ = std::move(request);
  set_wanted(true);
}

void ProfilerOnDemand::stop() {
  const std::lock_guard lock(mutex_);
  if (progress_.state == ProfileState::recording) stops_ = true;
  if (progress_.state != ProfileState::waiting) return;
  progress_ = {ProfileState::failed, "it was ended before its first step"};
  set_wanted(false);
}

ProfileOnDemand::Progress ProfilerOnDemand::progress() const {
  const std::lock_guard lock(mutex_);
  return progress_;
}

void ProfilerOnDemand::on_step(int64_t step) noexcept {
  const std::unique_lock lock(use_, std::try_to_lock);
  if (!lock) return;  // another thread trains, too, and is here already
  try {
    if (!profiler_) {
      begin_profile(step);
    } else if (std::this_thread::get_id() == thread_) {
      if (stops_ || Clock::now() >= ends_) {
        end_profile();
      } else {
        profiler_->step();
      }
    }
  } catch (...) {
    profiler_.reset();
    finish(ProfileState::failed, words_of(std::current_exception()));
  }
}

void ProfilerOnDemand::end() noexcept {
  const std::lock_guard lock(use_);
  if (!profiler_ || std::this_thread::get_id() != thread_) return;
  try {
    end_profile();
  } catch (...) {
    profiler_.reset();
    finish(ProfileState::failed, words_of(std::current_exception()));
  }
}

void ProfilerOnDemand::begin_profile(int64_t step) {
  std::string folder;
  std::chrono::milliseconds duration{};
  {
    const std::lock_guard lock(mutex_);
    if (progress_.state != ProfileState::waiting ||
        step < request_.first_step) {
      return;
    }
    progress_.state = ProfileState::recording;
    stops_ = false;
    folder = request_.folder;
    duration = request_.duration;
  }
  static thread_local const EndsWithThread ends_with_thread;
  thread_ = std::this_thread::get_id();
  file_.clear();
  profiler_ = std::make_unique<Profiler>(ProfilerOptions{
      .folder = folder,
      .schedule = ProfilerSchedule{.warmup = 1, .active = kManySteps},
      .on_trace_ready = [this](const std::string& file) { file_ = file; },
      // The others may be at another step.
      .compare_clocks = false});
  ends_ = Clock::now() + duration;
}

void ProfilerOnDemand::end_profile() {
  profiler_->stop();
  profiler_.reset();
#ifdef __GLIBC__
  // A trace of some seconds takes hundreds of megabytes until it is written.
  // The C library would keep them for this process.
  malloc_trim(0);
#endif
  if (file_.empty()) {
    finish(ProfileState::failed, "the training ended before a whole step");
  } else {
    finish(ProfileState::written,
           std::filesystem::path(file_).filename().string());
  }
}

void ProfilerOnDemand::finish(ProfileState state, std::string words) {
  const std::lock_guard lock(mutex_);
  progress_ = {state, std::move(words)};
  set_wanted(false);
}

}  // namespace lockstep::internal
