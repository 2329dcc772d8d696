#include "lockstep/observe/profiler.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/profiler/standalone/execution_trace_observer.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/errors.h"
#include "lockstep/comm/init.h"
#include "lockstep/observe/kineto_trace.h"
#include "lockstep/observe/log_names.h"
#include "lockstep/observe/recorded_spans.h"
#include "lockstep/observe/trace_metadata.h"
#include "lockstep/trace/span.h"
#include "lockstep/worker/profile_on_demand.h"

namespace lockstep {
namespace {

// How long a thread may need to record the operator that it executes.
constexpr std::chrono::milliseconds kRecordingEnds{100};

void require_at_least(const char* name, int64_t value, int64_t least) {
  if (value >= least) return;
  throw std::invalid_argument("ProfilerSchedule: " + std::string(name) +
                              " is " + std::to_string(value) + "; it must be " +
                              std::to_string(least) + " or more");
}

}  // namespace

ProfilerAction action_at(const ProfilerSchedule& schedule, int64_t step) {
  require_at_least("wait", schedule.wait, 0);
  require_at_least("warmup", schedule.warmup, 0);
  require_at_least("active", schedule.active, 1);
  require_at_least("repeat", schedule.repeat, 0);
  require_at_least("skip_first", schedule.skip_first, 0);
  require_at_least("the step", step, 0);
  if (step < schedule.skip_first) return ProfilerAction::none;
  step -= schedule.skip_first;
  if (schedule.skip_first_wait) step += schedule.wait;
  const int64_t cycle = schedule.wait + schedule.warmup + schedule.active;
  if (schedule.repeat > 0 && step / cycle >= schedule.repeat) {
    return ProfilerAction::none;
  }
  const int64_t in_cycle = step % cycle;
  if (in_cycle < schedule.wait) return ProfilerAction::none;
  if (in_cycle < schedule.wait + schedule.warmup) return ProfilerAction::warmup;
  return in_cycle < cycle - 1 ? ProfilerAction::record
                              : ProfilerAction::record_and_save;
}

namespace {

using internal::KinetoTrace;

// Kineto has one trace at a time in a process.
std::atomic<bool> profiler_exists{false};

// Runs several actions, each whatever became of those before, and throws the
// first exception at the end.
class Attempts {
 public:
  template <typename Action>
  void run(Action&& action) {
    try {
      std::forward<Action>(action)();
    } catch (...) {
      if (!first_) first_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_{};
};

bool records(ProfilerAction action) {
  return action == ProfilerAction::record ||
         action == ProfilerAction::record_and_save;
}

ProfilerOptions checked(ProfilerOptions options) {
  if (options.folder.empty()) {
    throw std::invalid_argument(
        "Profiler: folder is empty; name the folder for the traces");
  }
  if (options.schedule) (void)action_at(*options.schedule, 0);
  options.group = internal::group_if_any(options.group);
  KinetoTrace::check_folder(options.folder);
  return options;
}

// The rank in the names of the files.
int rank_in(const ProcessGroupPtr& group) {
  return group ? group->rank() : internal::log_rank();
}

}  // namespace

class Profiler::State {
 public:
  explicit State(ProfilerOptions options)
      : options_(checked(std::move(options))) {
    if (options_.compare_clocks) compare_clocks();
    enter(action_of(0));
    mark_step();
    running = this;
  }
  ~State() { running = nullptr; }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // The objects that LibTorch needs to end a trace are destroyed with the
  // thread that records: in the main thread before the static variables. So
  // does this.
  static void end_with_thread() {
    State* state = running;
    if (state && state->thread_ == std::this_thread::get_id()) {
      state->end_alone();
    }
  }

  void end_alone() {
    if (stopped_ || !is_of_this_process()) return;
    try {
      stop(/*compares_clocks=*/false);
    } catch (...) {
      TORCH_WARN(internal::words_of(std::current_exception()));
    }
  }

  void step() {
    require_own_thread("step()");
    if (stopped_) {
      throw std::logic_error(
          "Profiler: step() was called after stop(); construct another "
          "Profiler to go on");
    }
    step_mark_.reset();
    Attempts attempts;
    if (recording_ && action_ == ProfilerAction::record_and_save) {
      attempts.run([&] { finish_trace(options_.compare_clocks); });
    }
    ++step_;
    attempts.run([&] { enter(action_of(step_)); });
    mark_step();
    attempts.rethrow();
  }

  void stop(bool compares_clocks) {
    require_own_thread("stop()");
    if (std::exchange(stopped_, true)) return;
    step_mark_.reset();
    action_ = ProfilerAction::none;
    if (recording_) return finish_trace(compares_clocks);
    if (!trace_) return;
    // Kineto gives up what it has prepared only when it has been started.
    trace_->start();
    trace_->stop();
    trace_.reset();
  }

  // The trace belongs to the process that records it, not to its children.
  bool is_of_this_process() const { return ::getpid() == pid_; }
  bool compares_clocks() const { return options_.compare_clocks; }
  int64_t step_number() const { return step_; }
  ProfilerAction action() const { return action_; }

 private:
  struct ThreadEnd {
    ThreadEnd() {}
    ~ThreadEnd() { end_with_thread(); }
  };

  class OnlyProfiler {
   public:
    OnlyProfiler() {
      // A profile that was asked for from outside makes way.
      if (auto* asked = internal::ProfileOnDemand::provided()) asked->end();
      if (KinetoTrace::is_profiling() || profiler_exists.exchange(true)) {
        throw std::logic_error(
            "Profiler: this process profiles already; LibTorch can record one "
            "trace at a time, so destroy the other profiler first");
      }
    }
    ~OnlyProfiler() { profiler_exists = false; }
    OnlyProfiler(const OnlyProfiler&) = delete;
    OnlyProfiler& operator=(const OnlyProfiler&) = delete;
  };

  ProfilerAction action_of(int64_t step) const {
    return options_.schedule ? action_at(*options_.schedule, step)
                             : ProfilerAction::record;
  }

  void require_own_thread(const char* function) const {
    if (std::this_thread::get_id() == thread_) return;
    throw std::logic_error("Profiler: " + std::string(function) +
                           " was called in another thread than the "
                           "constructor; LibTorch's profiler belongs to one "
                           "thread, so call it there");
  }

  void compare_clocks() {
    if (!options_.group || options_.group->size() == 1) return;
    clock_ = internal::measure_clock_offset(options_.group);
  }

  void enter(ProfilerAction action) {
    action_ = action;
    if (action == ProfilerAction::none) return;
    if (!trace_) {
      trace_ = std::make_unique<KinetoTrace>(
          internal::KinetoOptions{.record_shapes = options_.record_shapes,
                                  .profile_memory = options_.profile_memory});
      // At a thread's end that is destroyed first which was made last. Starting
      // makes more of LibTorch's variables than preparing does.
      static thread_local const ThreadEnd prepared;
    }
    if (records(action) && !recording_) start_trace();
  }

  void mark_step() {
    if (!options_.schedule) return;
    step_mark_ =
        std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    step_mark_->before("ProfilerStep#" + std::to_string(step_));
  }

  void start_trace() {
    path_ = (std::filesystem::path(options_.folder) /
             ("rank" + std::to_string(rank_in(options_.group)) + "." +
              std::to_string(step_)))
                .string();
    if (options_.execution_trace) begin_execution_trace();
    trace_->start();
    recording_ = true;
    spans_ = std::make_shared<internal::RecordedSpans>();
    subscription_.emplace(spans_);
    static thread_local const ThreadEnd started;
  }

  // Ends and writes the trace. Whatever fails, nothing is recorded afterwards.
  void finish_trace(bool compares_clocks) {
    recording_ = false;
    subscription_.reset();
    spans_.reset();  // ends those that are open
    Attempts attempts;
    if (executing_) {
      attempts.run(
          [] { torch::profiler::impl::disableExecutionTraceObserver(); });
    }
    const auto disabled = std::chrono::steady_clock::now();
    // The ranks meet here, where nothing is recorded any more.
    if (compares_clocks) attempts.run([&] { compare_clocks(); });
    const auto trace = std::move(trace_);
    const std::string file = path_ + ".pt.trace.json";
    bool saved = false;
    attempts.run([&] { add_metadata(*trace); });
    attempts.run([&] {
      trace->stop();
      trace->save(file);
      saved = true;
    });
    if (executing_) attempts.run([&] { end_execution_trace(disabled); });
    if (saved && options_.on_trace_ready) {
      attempts.run([&] { options_.on_trace_ready(file); });
    }
    attempts.rethrow();
  }

  void add_metadata(KinetoTrace& trace) const {
    if (options_.profile_memory) trace.add_metadata("profile_memory", "1");
    if (options_.record_shapes) trace.add_metadata("record_shapes", "1");
    const auto distributed = internal::distributed_info();
    if (!distributed.empty())
      trace.add_metadata("distributedInfo", distributed);
    trace.add_metadata("lockstep",
                       internal::lockstep_info(options_.group, clock_));
  }

  void begin_execution_trace() {
    std::error_code failure;
    std::filesystem::create_directories(options_.folder, failure);
    const std::string file = path_ + ".pt.et.json";
    if (failure || !torch::profiler::impl::addExecutionTraceObserver(file)) {
      throw std::runtime_error("Profiler: the execution trace " + file +
                               " cannot be written; give a folder on a disk "
                               "with room in which this process may write");
    }
    executing_ = true;
    torch::profiler::impl::enableExecutionTraceObserver();
    const auto groups = internal::process_group_config();
    if (groups.empty()) return;
    // The node by which Python tells replay tools of the groups.
    at::RecordFunction node(at::RecordScope::USER_SCOPE);
    const std::vector<c10::IValue> arguments{groups};
    node.before("## process_group:init ##", &arguments);
  }

  // LibTorch frees the observer without a look at other threads, which may
  // still be recording an operator that they had begun before it was disabled.
  void end_execution_trace(std::chrono::steady_clock::time_point disabled) {
    executing_ = false;
    std::this_thread::sleep_until(disabled + kRecordingEnds);
    torch::profiler::impl::removeExecutionTraceObserver();
  }

  // The process's profiler, once it is whole.
  inline static std::atomic<State*> running{nullptr};

  const OnlyProfiler only_{};
  const pid_t pid_ = ::getpid();
  const std::thread::id thread_ = std::this_thread::get_id();
  const ProfilerOptions options_;
  internal::ClockOffset clock_{};
  int64_t step_ = 0;
  ProfilerAction action_ = ProfilerAction::none;
  bool stopped_ = false;
  bool recording_ = false;
  bool executing_ = false;
  std::string path_;  // of the trace under way, without its ending
  std::unique_ptr<KinetoTrace> trace_{};  // prepared, or being recorded
  std::shared_ptr<internal::RecordedSpans> spans_{};
  std::optional<internal::SpanSubscription> subscription_{};
  std::unique_ptr<at::RecordFunction> step_mark_{};
};

Profiler::Profiler(ProfilerOptions options)
    : state_(std::make_unique<State>(std::move(options))) {}

Profiler::~Profiler() {
  if (!state_->is_of_this_process()) {
    // LibTorch's part of it may be gone at this process's end.
    (void)state_.release();
    return;
  }
  state_->end_alone();
}

void Profiler::step() { state_->step(); }
void Profiler::stop() { state_->stop(state_->compares_clocks()); }
int64_t Profiler::step_number() const { return state_->step_number(); }
ProfilerAction Profiler::action() const { return state_->action(); }

}  // namespace lockstep
