#include "lockstep/worker/training_counters.h"

#include <mutex>

#include "lockstep/base/deadline.h"
#include "lockstep/base/no_destructor.h"
#include "lockstep/worker/profile_on_demand.h"
#include "lockstep/worker/training_summary.h"

namespace lockstep::internal {
namespace {

thread_local int whole_steps = 0;

struct ProgressText {
  std::mutex mutex;
  std::string line;
};

// Never destroyed: a progress bar may outlive main().
ProgressText& progress_text() {
  static NoDestructor<ProgressText> instance;
  return *instance;
}

}  // namespace

TrainingCounters& TrainingCounters::instance() {
  static TrainingCounters counters;
  return counters;
}

void TrainingCounters::count_step() noexcept {
  if (whole_steps > 0) return;
  const int64_t step = steps_.fetch_add(1, std::memory_order_relaxed) + 1;
  const int64_t now = steady_ns();
  last_step_ns_.store(now, std::memory_order_relaxed);
  TrainingSummary::note_progress(0, now);
  if (ProfileOnDemand::is_wanted()) ProfileOnDemand::provided()->on_step(step);
}

TrainingCounters::WholeStep::WholeStep() noexcept {
  instance().count_step();
  ++whole_steps;
}

TrainingCounters::WholeStep::~WholeStep() { --whole_steps; }

void TrainingCounters::count_samples(int64_t samples) noexcept {
  samples_.fetch_add(samples, std::memory_order_relaxed);
  TrainingSummary::note_progress(samples, steady_ns());
  // A training without a wrapper has no other steps.
  if (steps() == 0 && ProfileOnDemand::is_wanted()) {
    ProfileOnDemand::provided()->on_step(0);
  }
}

void TrainingCounters::count_snapshot() noexcept {
  last_snapshot_ns_.store(steady_ns(), std::memory_order_relaxed);
}

void TrainingCounters::set_progress(std::string_view line) {
  ProgressText& text = progress_text();
  const std::lock_guard lock(text.mutex);
  text.line = line;
}

std::string TrainingCounters::progress() const {
  ProgressText& text = progress_text();
  const std::lock_guard lock(text.mutex);
  return text.line;
}

}  // namespace lockstep::internal
