#include "lockstep/worker/training_counters.h"

#include <unistd.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/no_destructor.h"
#include "lockstep/worker/profile_on_demand.h"
#include "lockstep/worker/rank_environment.h"

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

using nlohmann::json;

class SummaryFile {
 public:
  // Null if nobody asked for a summary. Never destroyed.
  static SummaryFile* asked_for() {
    static SummaryFile* const instance = make().release();
    return instance;
  }

  void note_progress(int64_t samples, int64_t now_ns) {
    if (!is_mine()) return;
    const std::lock_guard lock(mutex_);
    if (begun_ns_ == 0) {
      begun_ns_ = now_ns;
      std::atexit([] { asked_for()->write(); });
    }
    if (samples == 0) return;
    if (first_batch_ns_ == 0) first_batch_ns_ = now_ns;
    samples_before_last_batch_ = samples_;
    samples_ += samples;
    last_batch_ns_ = now_ns;
  }

  void note_metric(std::string_view name, double value) {
    if (!is_mine()) return;
    const std::lock_guard lock(mutex_);
    metrics_.insert_or_assign(std::string(name), value);
    if (!target_ || target_s_ || begun_ns_ == 0) return;
    const MetricTarget target = MetricTarget::parse(*target_);
    if (target.name == name && target.is_met(value)) {
      target_s_ = static_cast<double>(steady_ns() - begun_ns_) / 1e9;
    }
  }

 private:
  SummaryFile(std::string folder, std::optional<std::string> target)
      : folder_(std::move(folder)), target_(std::move(target)) {}

  static std::unique_ptr<SummaryFile> make() {
    auto folder = get_env("LOCKSTEP_TRAINING_SUMMARY");
    if (!folder) return nullptr;
    auto target = get_env("LOCKSTEP_TRAINING_TARGET");
    try {
      if (target) MetricTarget::parse(*target);
    } catch (const std::invalid_argument&) {
      target.reset();  // `lockstep report scaling` has checked its own
    }
    return std::unique_ptr<SummaryFile>(
        new SummaryFile(std::move(*folder), std::move(target)));
  }

  // In a child of fork() the mutex may be locked for ever.
  bool is_mine() const { return getpid() == process_; }

  void write() noexcept try {
    if (!is_mine()) return;
    const std::lock_guard lock(mutex_);
    json metrics = json::object();
    // JSON has no NaN: the library writes null.
    for (const auto& [name, value] : metrics_) metrics[name] = value;
    const double seconds =
        static_cast<double>(last_batch_ns_ - first_batch_ns_) / 1e9;
    const json summary{
        {"samples", samples_},
        {"samples_per_s",
         seconds > 0
             ? json(static_cast<double>(samples_before_last_batch_) / seconds)
             : json()},
        {"metrics", metrics},
        {"target_s", target_s_ ? json(*target_s_) : json()}};
    const std::string file =
        folder_ + "/rank-" + get_rank_env("RANK").value_or("0") + ".json";
    std::ofstream(file + ".part")
        << summary.dump(-1, ' ', false, json::error_handler_t::replace);
    std::error_code ignored;
    std::filesystem::rename(file + ".part", file, ignored);
  } catch (const std::exception&) {
    // The report says that the file is missing.
  }

  const std::string folder_;
  const std::optional<std::string> target_;
  const pid_t process_ = getpid();
  std::mutex mutex_;
  int64_t begun_ns_ = 0;
  int64_t first_batch_ns_ = 0;
  int64_t last_batch_ns_ = 0;
  int64_t samples_ = 0;
  int64_t samples_before_last_batch_ = 0;
  std::optional<double> target_s_{};
  std::map<std::string, double> metrics_{};
};

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

void TrainingSummary::note_progress(int64_t samples, int64_t now_ns) noexcept {
  if (auto* file = SummaryFile::asked_for()) {
    file->note_progress(samples, now_ns);
  }
}

void TrainingSummary::note_metric(std::string_view name, double value) {
  if (auto* file = SummaryFile::asked_for()) file->note_metric(name, value);
}

MetricTarget MetricTarget::parse(std::string_view text) {
  const size_t at = text.find_last_of("<>");
  MetricTarget target;
  if (at != std::string_view::npos && at > 0 && text.substr(at + 1, 1) == "=") {
    target.name = text.substr(0, at);
    target.at_most = text[at] == '<';
    const std::string_view number = text.substr(at + 2);
    const auto [end, error] = std::from_chars(
        number.data(), number.data() + number.size(), target.value);
    if (error == std::errc() && end == number.data() + number.size() &&
        std::isfinite(target.value)) {
      return target;
    }
  }
  throw std::invalid_argument(
      "\"" + std::string(text) +
      "\" is not a target; give a metric that the program "
      "logs, <= or >=, and a number: \"loss<=0.3\"");
}

bool MetricTarget::is_met(double number) const {
  return at_most ? number <= value : number >= value;
}

}  // namespace lockstep::internal
