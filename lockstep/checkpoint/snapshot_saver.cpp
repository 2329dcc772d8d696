#include "lockstep/checkpoint/snapshot_saver.h"

#include <c10/util/Exception.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/save.h"
#include "lockstep/checkpoint/staged_copy.h"
#include "lockstep/comm/errors.h"
#include "lockstep/comm/reconfigure.h"
#include "lockstep/trace/current_call.h"
#include "lockstep/trace/span.h"
#include "lockstep/worker/healing_place.h"
#include "lockstep/worker/stop_signals.h"
#include "lockstep/worker/training_counters.h"

namespace lockstep {
namespace {

using internal::Ranks;
using Clock = std::chrono::steady_clock;

// The thread that writes gets a core when the training leaves one, and a tenth
// of one that the training uses.
constexpr int kNiceness = 10;
constexpr std::chrono::seconds kProgressInterval{1};

// Tells about once a second how many bytes were written.
class ReportingFiles final : public internal::SaveFiles {
 public:
  explicit ReportingFiles(std::function<void(uint64_t bytes)> report)
      : report_(std::move(report)) {}

 private:
  void before(const char*, const std::string&) override {
    if (Clock::now() - last_ < kProgressInterval) return;
    last_ = Clock::now();
    report_(bytes_written());
  }

  const std::function<void(uint64_t)> report_;
  Clock::time_point last_ = Clock::now();
};

void check(const SnapshotSaverOptions& options) {
  if (options.every_steps < 0) {
    throw std::invalid_argument(
        "SnapshotSaverOptions::every_steps is " +
        std::to_string(options.every_steps) +
        "; give the number of steps between two saves, or 0 for none");
  }
  if (options.every && *options.every <= std::chrono::milliseconds(0)) {
    throw std::invalid_argument("SnapshotSaverOptions::every is " +
                                std::to_string(options.every->count()) +
                                " ms; give more than 0, or leave it out");
  }
  if (options.keep_last < 0 || options.keep_every < 0) {
    throw std::invalid_argument(
        "SnapshotSaverOptions::keep_last and keep_every must be 0 or more");
  }
  if (options.overlap_copy && !options.in_background) {
    throw std::invalid_argument(
        "SnapshotSaverOptions::overlap_copy needs in_background");
  }
}

}  // namespace

class SnapshotSaver::Impl {
 public:
  Impl(std::string path, const TrainingState& state,
       SnapshotSaverOptions options)
      : path_(std::move(path)),
        state_(state),
        options_((check(options), std::move(options))),
        ranks_(options_.group),
        ranks_of_thread_(options_.in_background ? ranks_.through_store()
                                                : ranks_),
        signals_(options_.stop_signals),
        seen_step_(state.step) {
    internal::require_savable(path_, state_, save_options(), ranks_);
    if (internal::job_heals()) {
      on_reconfigured_.emplace([this] { begin_again(); });
    }
  }

  ~Impl() {
    try {
      wait();
    } catch (const std::exception& error) {
      TORCH_WARN("lockstep: SnapshotSaverOptions::on_saved threw: ",
                 error.what());
    }
  }

  bool is_due() {
    report_if_done();
    is_saved_ = false;
    if (std::exchange(answers_again_, false) && state_.step == seen_step_) {
      return was_due_;
    }
    bool due = makes_up_ || (options_.every_steps > 0 &&
                             state_.step / options_.every_steps !=
                                 seen_step_ / options_.every_steps);
    if (options_.every || !options_.stop_signals.empty()) {
      const bool time_is_over = options_.every && ranks_.rank() == 0 &&
                                !under_way_ &&
                                Clock::now() - began_ >= *options_.every;
      const auto all = ranks_.any({due || time_is_over, signals_.have_come()});
      const bool is_stopped_now = all[1] != 0 && !stop_requested_;
      stop_requested_ = stop_requested_ || is_stopped_now;
      due = all[0] != 0 || is_stopped_now;
    }
    // Not earlier: if a rank is lost in the all_reduce, is_due() is called
    // again and must find the same.
    seen_step_ = state_.step;
    was_due_ = due;
    return due;
  }

  bool stop_requested() const { return stop_requested_; }

  void save() {
    const auto called = Clock::now();
    wait();
    began_ = called;
    ++saves_;
    is_saved_ = is_on_disk_ = makes_up_ = false;
    result_ = {.step = state_.step};
    failure_ = nullptr;
    files_ = files();
    try {
      save_ =
          internal::begin_save(path_, state_, save_options(), ranks_, *files_);
    } catch (const SnapshotError&) {
      failure_ = std::current_exception();
    } catch (const std::system_error&) {
      failure_ = std::current_exception();
    }
    if (save_) {
      is_saved_ = true;
      count_bytes();
      // All ranks have ended the save before, and count saves alike.
      ranks_of_thread_.begin_save(saves_);
      if (options_.in_background && start_thread()) return;
      write_and_commit();
    }
    result_.total = blocked_ = Clock::now() - began_;
    ended();
  }

  void wait_for_copy() {
    if (!std::exchange(copy_is_pending_, false)) return;
    const internal::Span span("snapshot", "wait");
    const auto begin = Clock::now();
    try {
      copy_.copy();
    } catch (const std::runtime_error&) {
      // The thread gets the same error, and tells the save.
    }
    blocked_ += Clock::now() - begin;
  }

  void wait() {
    wait_for_copy();
    if (!under_way_) return;
    const internal::Span span("snapshot", "wait");
    thread_.join();
    ended();
  }

  void finish() {
    wait();
    const bool is_saved = is_saved_ && !failure_ && result_.step == state_.step;
    if (ranks_.any({!is_saved})[0] != 0) {
      save();
      wait();
    }
    // The other ranks have read how the save has ended before one of them
    // throws and leaves with the store.
    ranks_.any({0});
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  // A new process has made its saver anew. All ranks must find the same saves
  // due, and exchange texts at the new generation's part of the store.
  //
  // The call of is_due() after the last step may be made again: by all ranks if
  // it is in the function that was interrupted, otherwise by the new process
  // alone, on its way to where the others are. So its answer stays. A save that
  // no rank has ended is made up for.
  void begin_again() {
    ranks_of_thread_.give_up();
    wait();
    // Each of these two numbers has a flag in its lowest bit, so the largest
    // one has the flag of the ranks that have come farthest.
    const auto agreed =
        ranks_.any({2 * seen_step_ + (was_due_ ? 1 : 0),
                    2 * static_cast<int64_t>(saves_) + (is_on_disk_ ? 1 : 0),
                    stop_requested_ ? 1 : 0});
    seen_step_ = agreed[0] >> 1;
    was_due_ = (agreed[0] & 1) != 0;
    answers_again_ = true;
    saves_ = static_cast<uint64_t>(agreed[1] >> 1);
    is_on_disk_ = (agreed[1] & 1) != 0;
    makes_up_ = !is_on_disk_;
    stop_requested_ = agreed[2] != 0;
    ranks_of_thread_ = options_.in_background ? ranks_.through_store() : ranks_;
  }

  SnapshotOptions save_options() const {
    return {.group = options_.group,
            .keep_last = options_.keep_last,
            .keep_every = options_.keep_every};
  }

  std::unique_ptr<internal::SaveFiles> files() {
    bytes_total_ = 0;
    if (!options_.on_progress) return std::make_unique<internal::SaveFiles>();
    return std::make_unique<ReportingFiles>(
        [this](uint64_t bytes) { report_progress(bytes); });
  }

  // Errors of this rank alone are thrown by commit(), on all ranks.
  void count_bytes() {
    try {
      for (const auto& entry : save_->tensors()) {
        // nbytes() throws for a tensor that is sparse.
        bytes_total_ += static_cast<uint64_t>(entry.tensor->numel()) *
                        entry.tensor->element_size();
      }
    } catch (...) {
      save_->fail(std::current_exception());
    }
  }

  void report_progress(uint64_t bytes) const {
    // Headers are written, too.
    options_.on_progress({.step = result_.step,
                          .bytes_written = std::min(bytes, bytes_total_),
                          .bytes_total = bytes_total_});
  }

  // Returns false if the system has no more threads.
  bool start_thread() {
    try {
      copy_.begin(*save_);
      copy_is_pending_ = true;
    } catch (...) {
      save_->fail(std::current_exception());  // no memory, say
    }
    is_done_ = false;
    try {
      thread_ = std::thread([this, copies = copy_is_pending_] {
        if (copies) copy();
        // If this fails, the thread competes with the training as an equal.
        ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNiceness);
        write_and_commit();
        is_done_ = true;
      });
    } catch (const std::system_error&) {
      if (std::exchange(copy_is_pending_, false)) copy();
      return false;
    }
    under_way_ = true;
    if (!options_.overlap_copy) wait_for_copy();
    blocked_ = Clock::now() - began_;
    return true;
  }

  void copy() {
    try {
      copy_.copy();
    } catch (...) {
      save_->fail(std::current_exception());
    }
  }

  void write_and_commit() {
    const internal::Span span("snapshot", "write");
    try {
      save_->write();
      if (options_.on_progress) report_progress(files_->bytes_written());
      result_.path = save_->commit(ranks_of_thread_);
      internal::TrainingCounters::instance().count_snapshot();
    } catch (...) {
      failure_ = std::current_exception();
    }
    save_.reset();  // removes what a failed save has written
    result_.total = Clock::now() - began_;
  }

  void report_if_done() {
    if (under_way_ && is_done_) wait();
  }

  void ended() {
    under_way_ = false;
    copy_.end();
    files_.reset();
    result_.blocked = std::exchange(blocked_, {});
    is_on_disk_ = !failure_;
    if (failure_) {
      result_.path.clear();
      result_.error = internal::words_of(failure_);
    }
    if (options_.on_saved) {
      options_.on_saved(result_);
    } else if (failure_ && ranks_.rank() == 0) {
      TORCH_WARN("lockstep: a snapshot was not saved, and training goes on: ",
                 result_.error);
    }
  }

  const std::string path_;
  const TrainingState& state_;
  const SnapshotSaverOptions options_;
  const Ranks ranks_;
  Ranks ranks_of_thread_;
  const internal::StopSignals signals_;

  // When to save.
  Clock::time_point began_ = Clock::now();
  // The step of the last is_due(), and what that has returned.
  int64_t seen_step_;
  bool was_due_ = false;
  // Whether save() has begun a save after the last is_due().
  bool is_saved_ = false;
  uint64_t saves_ = 0;  // how often save() was called, on all ranks alike
  // Whether the last save has succeeded; true before the first one.
  bool is_on_disk_ = true;
  bool stop_requested_ = false;
  // After a healing: whether is_due() returns was_due_ once more if the step is
  // seen_step_, and whether a save is due because the last one was interrupted.
  bool answers_again_ = false;
  bool makes_up_ = false;

  // The save that is under way, or the last one. While the thread runs, these
  // are its own.
  std::unique_ptr<internal::SaveFiles> files_;
  std::unique_ptr<internal::Save> save_;
  uint64_t bytes_total_ = 0;
  SavedSnapshot result_;
  std::exception_ptr failure_;

  // Shared with the thread.
  internal::StagedCopy copy_;
  std::atomic<bool> is_done_{false};

  bool under_way_ = false;
  bool copy_is_pending_ = false;
  std::chrono::duration<double> blocked_{};
  std::thread thread_;
  // If the training can be healed.
  std::optional<internal::OnReconfigured> on_reconfigured_{};
};

SnapshotSaver::SnapshotSaver(std::string path, const TrainingState& state,
                             SnapshotSaverOptions options) {
  const internal::UserFunction function("SnapshotSaver()");
  impl_ = std::make_unique<Impl>(std::move(path), state, std::move(options));
}

SnapshotSaver::~SnapshotSaver() = default;

bool SnapshotSaver::is_due() {
  const internal::UserFunction function("SnapshotSaver::is_due()");
  return impl_->is_due();
}

bool SnapshotSaver::stop_requested() const { return impl_->stop_requested(); }

void SnapshotSaver::save() {
  const internal::UserFunction function("SnapshotSaver::save()");
  const internal::Span span("snapshot", "save");
  impl_->save();
}

void SnapshotSaver::wait_for_copy() { impl_->wait_for_copy(); }

void SnapshotSaver::wait() { impl_->wait(); }

void SnapshotSaver::finish() {
  const internal::UserFunction function("SnapshotSaver::finish()");
  impl_->finish();
}

}  // namespace lockstep
