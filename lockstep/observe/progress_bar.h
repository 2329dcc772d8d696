#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

struct ProgressBarOptions {
  // ---- Behaviour ----

  // Text in front of the bar, such as "Epoch 3".
  std::string description{};
  // The unit that update() counts.
  std::string unit = "it";
  // How much an earlier run has done; it counts as done, but not for the rate.
  int64_t initial = 0;
  // Whether nothing is shown. By default, only rank 0 of the default group
  // shows its bar (every process if there is no group), and none does if the
  // environment variable LOCKSTEP_PROGRESS is "off".
  std::optional<bool> disable{};
  // Whether the last state of the bar stays on the terminal.
  bool leave = true;
  // Where the bar is shown.
  std::FILE* file = stderr;

  // ---- Performance: most programs leave these alone ----

  // How often a terminal is written.
  std::chrono::milliseconds min_interval{100};
  // How often a line is written if `file` is not a terminal.
  std::chrono::milliseconds line_interval{10'000};
};

// Shows a person how far a loop has come, as the Python package tqdm does:
//
//   lockstep::ProgressBar bar(steps, {.description = "Training"});
//   for (int64_t step = 0; step < steps; ++step) {
//     ...
//     if (bar.due()) bar.set_postfix({{"loss", loss.item<double>()}});
//     bar.update();
//   }
//
//   Training:  45%|#########...........| 900/2000 [00:03<00:04, 290it/s,
//   loss=0.3]
//
// A terminal has one line, which changes in place and is cut to the width of
// the terminal. Anything else (a file, a pipe, `lockstep run --tee`) gets a
// line without the bar every `line_interval` and, after the first of these, one
// at the end. The rate is an average in which the last second or so counts
// most, as in tqdm.
//
// If the other ranks of this host wait for one of them for more than a tenth of
// their time, the line ends with "waits for rank 3". Only ranks that `lockstep
// run` has started know it.
//
// Never blocks for other ranks, and never throws because `file` cannot be
// written. Threads: one at a time. If two bars are on one terminal at a time,
// they overwrite each other.
class ProgressBar {
 public:
  // `total` is what will have been done at the end, `initial` included; without
  // it there is neither a bar nor a time that is left. Throws
  // std::invalid_argument if a number or an interval is negative.
  explicit ProgressBar(std::optional<int64_t> total,
                       ProgressBarOptions options = {});
  // Calls close().
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // Adds `n`, and shows the bar if it is due; a terminal also when the total is
  // reached. Costs one read of the clock if it is not. Throws
  // std::invalid_argument if `n` is negative.
  void update(int64_t n = 1);
  // Returns whether the bar will be shown with what is set before the next
  // update(n): then, or at the end if that update reaches the total. If not, a
  // value that costs time, such as that of a tensor on a GPU, need not be
  // fetched. Without a total, set the last values before close().
  bool due(int64_t n = 1) const;
  // Sets the values at the end of the line; shown from the next time on.
  void set_postfix(
      std::initializer_list<std::pair<std::string_view, double>> values);
  void set_description(std::string description);
  // Writes `line` and a newline to `to` so that the bar stays whole below it.
  // Does so too if the bar is disabled.
  void write(std::string_view line, std::FILE* to = stdout);
  // Shows the last state and ends the line. Further updates show nothing.
  void close() noexcept;

  // The number of units that are done, `initial` included.
  int64_t count() const { return count_; }
  std::optional<int64_t> total() const { return total_; }

 private:
  using Clock = std::chrono::steady_clock;

  bool interval_has_passed() const;
  bool reaches_total(int64_t n) const;
  void show(Clock::time_point now);
  std::string state_line(Clock::time_point now, int width) const;
  void clear() const;

  std::optional<int64_t> total_;
  ProgressBarOptions options_;
  bool shows_ = false;
  bool terminal_ = false;
  bool shown_once_ = false;
  bool on_terminal_ = false;  // the terminal's last line is the bar
  int64_t count_ = 0;
  std::vector<std::pair<std::string, double>> postfix_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point shown_ = start_;
  int64_t shown_count_ = 0;
  // Sums of what was done, and of the seconds that it took, in which each
  // interval weighs less than the one after it.
  double recent_count_ = 0;
  double recent_seconds_ = 0;
};

// A range that shows how far a loop over it has come; with_progress() makes it.
template <class Range>
class ProgressRange {
 public:
  ProgressRange(Range&& range, std::optional<int64_t> total,
                ProgressBarOptions options)
      : range_(std::forward<Range>(range)), bar_(total, std::move(options)) {}

  ProgressBar& bar() { return bar_; }

  template <class Iterator>
  class Counted {
   public:
    Counted(Iterator iterator, ProgressBar& bar)
        : iterator_(std::move(iterator)), bar_(&bar) {}
    decltype(auto) operator*() { return *iterator_; }
    Counted& operator++() {
      bar_->update();
      ++iterator_;
      return *this;
    }
    template <class End>
    bool is_at(const End& end) const {
      return iterator_ == end;
    }

   private:
    Iterator iterator_;
    ProgressBar* bar_;
  };
  template <class Sentinel>
  struct End {
    Sentinel sentinel;
    template <class Iterator>
    friend bool operator==(const Counted<Iterator>& counted, const End& end) {
      return counted.is_at(end.sentinel);
    }
  };

  auto begin() {
    using std::begin;
    return Counted(begin(range_), bar_);
  }
  auto end() {
    using std::end;
    return End<decltype(end(range_))>{end(range_)};
  }

 private:
  Range range_;
  ProgressBar bar_;
};

// Returns a range over the elements of `range`, a DataLoader for example, whose
// progress is shown while a loop goes over it, once:
//
//   for (auto& batch : lockstep::with_progress(loader)) { ... }
//
// An lvalue is referred to, and must outlive the result. The total is
// range.size(), if there is such a function.
template <class Range>
ProgressRange<Range> with_progress(Range&& range,
                                   ProgressBarOptions options = {}) {
  std::optional<int64_t> total;
  if constexpr (requires { static_cast<int64_t>(range.size()); }) {
    total = static_cast<int64_t>(range.size());
  }
  return {std::forward<Range>(range), total, std::move(options)};
}

}  // namespace lockstep
