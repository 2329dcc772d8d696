#include "lockstep/observe/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "lockstep/base/environment.h"
#include "lockstep/comm/init.h"
#include "lockstep/observe/progress_line.h"
#include "lockstep/worker/status_publisher.h"
#include "lockstep/worker/training_counters.h"

namespace lockstep {
namespace {

// How much the last interval counts in the rate: tqdm's `smoothing`.
constexpr double kSmoothing = 0.3;

bool is_disabled(const ProgressBarOptions& options) {
  if (options.disable) return *options.disable;
  if (internal::get_env("LOCKSTEP_PROGRESS") == "off") return true;
  return is_initialized() && get_rank() != 0;
}

int terminal_width(std::FILE* file) {
  winsize size{};
  const bool known = ::ioctl(::fileno(file), TIOCGWINSZ, &size) == 0;
  return known && size.ws_col > 0 ? size.ws_col : 80;
}

void require(bool ok, const std::string& text) {
  if (!ok) throw std::invalid_argument("ProgressBar: " + text);
}

}  // namespace

ProgressBar::ProgressBar(std::optional<int64_t> total,
                         ProgressBarOptions options)
    : total_(total), options_(std::move(options)), count_(options_.initial) {
  require(total_.value_or(0) >= 0, "total is " +
                                       std::to_string(total_.value_or(0)) +
                                       "; give 0 or more, or std::nullopt");
  require(
      options_.initial >= 0,
      "initial is " + std::to_string(options_.initial) + "; give 0 or more");
  require(
      options_.min_interval.count() >= 0 && options_.line_interval.count() >= 0,
      "an interval is negative; give 0 or more milliseconds");
  require(options_.file != nullptr, "file is null; give stderr or another");
  shows_ = !is_disabled(options_);
  terminal_ = ::isatty(::fileno(options_.file)) == 1;
  shown_count_ = count_;
  if (shows_ && terminal_) show(start_);
}

ProgressBar::~ProgressBar() { close(); }

bool ProgressBar::interval_has_passed() const {
  const auto interval =
      terminal_ ? options_.min_interval : options_.line_interval;
  return Clock::now() - shown_ >= interval;
}

bool ProgressBar::reaches_total(int64_t n) const {
  return total_ && count_ < *total_ && n >= *total_ - count_;
}

bool ProgressBar::due(int64_t n) const {
  return shows_ && (reaches_total(n) || interval_has_passed());
}

void ProgressBar::update(int64_t n) {
  require(n >= 0, "update(" + std::to_string(n) + "); give 0 or more");
  const bool is_last = terminal_ && reaches_total(n);
  count_ += std::min(n, std::numeric_limits<int64_t>::max() - count_);
  if (shows_ && (is_last || interval_has_passed())) show(Clock::now());
}

void ProgressBar::set_postfix(
    std::initializer_list<std::pair<std::string_view, double>> values) {
  postfix_.assign(values.begin(), values.end());
}

void ProgressBar::set_description(std::string description) {
  options_.description = std::move(description);
}

void ProgressBar::write(std::string_view line, std::FILE* to) {
  if (on_terminal_) clear();
  std::fprintf(to, "%.*s\n", static_cast<int>(line.size()), line.data());
  std::fflush(to);
  if (on_terminal_) show(Clock::now());
}

void ProgressBar::close() noexcept {
  if (!shows_) return;
  if (shown_once_) show(Clock::now());
  if (on_terminal_) {
    if (options_.leave) {
      std::fputc('\n', options_.file);
    } else {
      clear();
    }
    std::fflush(options_.file);
  }
  shows_ = on_terminal_ = false;
}

void ProgressBar::show(Clock::time_point now) {
  const std::chrono::duration<double> passed = now - shown_;
  recent_count_ = kSmoothing * static_cast<double>(count_ - shown_count_) +
                  (1 - kSmoothing) * recent_count_;
  recent_seconds_ =
      kSmoothing * passed.count() + (1 - kSmoothing) * recent_seconds_;
  shown_ = now;
  shown_count_ = count_;
  internal::TrainingCounters::instance().set_progress(state_line(now, 0));
  const std::string line =
      state_line(now, terminal_ ? terminal_width(options_.file) : 0);
  // The bar's line is written over; "\033[K" erases what is left of it.
  std::fprintf(options_.file, terminal_ ? "\r%s\033[K" : "%s\n", line.c_str());
  std::fflush(options_.file);
  on_terminal_ = terminal_;
  shown_once_ = true;
}

std::string ProgressBar::state_line(Clock::time_point now, int width) const {
  internal::ProgressState state{
      .description = options_.description,
      .unit = options_.unit,
      .count = count_,
      .total = total_,
      .elapsed_seconds = std::chrono::duration<double>(now - start_).count()};
  if (recent_seconds_ > 0) state.rate = recent_count_ / recent_seconds_;
  for (const auto& [name, value] : postfix_) {
    state.postfix += (state.postfix.empty() ? "" : ", ") + name + "=" +
                     internal::short_number(value);
  }
  if (const auto rank = internal::StatusPublisher::slowest_rank()) {
    state.postfix += (state.postfix.empty() ? "" : ", ") +
                     ("waits for rank " + std::to_string(*rank));
  }
  return internal::progress_line(state, width);
}

void ProgressBar::clear() const {
  std::fputs("\r\033[K", options_.file);
  std::fflush(options_.file);
}

}  // namespace lockstep
