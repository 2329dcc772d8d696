#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/comm/process_group.h"

namespace lockstep {

// Which steps of a training a Profiler records, as torch.profiler.schedule
// (PyTorch documentation, "torch.profiler"). The first `skip_first` steps are
// left out. Then cycles follow, each of `wait` steps that are left out,
// `warmup` steps in which Kineto prepares to record, and `active` steps that
// are recorded. At the end of a cycle its trace is written.
struct ProfilerSchedule {
  // Zero or more.
  int64_t wait{0};
  // Zero or more. With 1, what Kineto does at its first start is not recorded.
  // (In Python it must be given.)
  int64_t warmup{1};
  // One or more.
  int64_t active{1};
  // How many cycles there are. 0 means no limit.
  int64_t repeat{0};
  // Zero or more.
  int64_t skip_first{0};
  // Whether the first cycle has no `wait` steps.
  bool skip_first_wait{false};
};

// The action of a Profiler in one step; torch.profiler.ProfilerAction.
enum class ProfilerAction {
  none,
  warmup,
  record,
  record_and_save,  // records, and writes the trace at the end of the step
};

// Returns what the schedule says of step `step`; the first step is 0. Throws
// std::invalid_argument if `step` or a member of `schedule` is out of its
// range.
ProfilerAction action_at(const ProfilerSchedule& schedule, int64_t step);

// The arguments of torch.profiler.profile that mean something in C++ (PyTorch
// documentation, "torch.profiler"). Kineto records no stacks of C++ and writes
// no counts of operations into a trace, so with_stack, with_modules and
// with_flops are left out.
struct ProfilerOptions {
  // Each rank writes FOLDER/rank<R>.<N>.pt.trace.json, where N is the number of
  // the first recorded step. R is its rank in `group`; if there was no group at
  // the construction, its rank in the default group by then, else that of the
  // launcher's variable RANK, else 0. The constructor makes the folder if it is
  // missing. Its name must be UTF-8 without control characters, quotation
  // marks, backslashes and "://", which Kineto cannot write.
  std::string folder{"traces"};

  // Which steps are recorded. The same on all ranks. None means the steps from
  // the construction to stop() are recorded in one trace, as in Python.
  std::optional<ProfilerSchedule> schedule{};

  // Adds shapes and dtypes of the operators' inputs, and the attributes of
  // Lockstep's spans. Costs time for each operator.
  bool record_shapes{false};
  // Adds each allocation and free of a tensor's memory.
  bool profile_memory{false};

  // Also writes FOLDER/rank<R>.<N>.pt.et.json, the execution trace of the same
  // steps: every operator with its inputs, which tools replay (torch.profiler,
  // ExecutionTraceObserver).
  bool execution_trace{false};

  // Called with the path of a trace when it has been written, in step() or
  // stop(). What it throws comes out of that function.
  std::function<void(const std::string& file)> on_trace_ready{};

  // The ranks whose clocks are compared; null is the default group, or this
  // process alone if there is none.
  ProcessGroupPtr group{};
  // Whether the ranks compare their clocks, so that the traces of several hosts
  // can be laid over each other. It makes the construction and the end of a
  // cycle collective. Set it to false to profile on some ranks only.
  bool compare_clocks{true};
};

// Records what this process does in some steps of a training, by Kineto, as
// torch.profiler.profile does, and writes traces for Perfetto,
// chrome://tracing, TensorBoard and Python's trace tools:
//
//   lockstep::Profiler profiler({.folder = "traces",
//                                .schedule = {{.wait = 10, .active = 3}}});
//   for (auto& batch : loader) {
//     train(batch);
//     profiler.step();
//   }
//
// A trace holds the operators of the thread that made the profiler and of
// autograd's threads, and in all threads the spans of Lockstep, whose names
// begin with "lockstep::" (docs/profiling.md lists them). Collectives are
// record_param_comms events, with the arguments that c10d gives them. If there
// is a schedule, each step is an event "ProfilerStep#N". As in Python, the
// trace has the object "distributedInfo", and in addition "lockstep":
//
//   {"version": 1, "rank": 0, "world_size": 2, "host": "...", "pid": 1,
//    "clock_offset_ns": 0, "clock_uncertainty_ns": 0}
//
// A time of the trace plus clock_offset_ns is the time on the clock of rank 0
// of the group; the error is clock_uncertainty_ns at most, if nobody sets a
// clock meanwhile. The offset is that of the fastest of several round trips to
// rank 0 (F. Cristian, "Probabilistic clock synchronization", 1989), measured
// at the construction and again at the end of each cycle.
//
// Blocking: if options.compare_clocks, the construction, the step() that ends a
// cycle, and stop() while steps are recorded are collective: they wait for the
// other ranks of the group, for its timeout at most.
//
// Threads: construct, use and destroy it in one thread, the one that trains.
// A process has one Profiler at a time; constructing it ends a profile of the
// same thread that `lockstep profile` has asked for, and what that has recorded
// is written. If that thread ends before the profiler is destroyed, then the
// profiler does what its destructor does at the thread's end. For the main
// thread this is at the return from main() and at std::exit(), so a static
// Profiler writes its trace, too. A process that was forked off while the
// profiler existed writes nothing.
class Profiler {
 public:
  // Throws std::invalid_argument if the schedule is out of range or the folder
  // has no name that is allowed, std::runtime_error if no file can be made in
  // it, std::logic_error if this process profiles already, and c10::DistError
  // as collectives do. The first three are thrown before the clocks are
  // compared, so a rank may throw alone; the others then throw c10::DistError
  // when that rank has left or the group's timeout is over.
  explicit Profiler(ProfilerOptions options = {});
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;
  // Does what stop() does, but compares no clocks, so that a rank that leaves
  // by an exception waits for nobody: the trace has the offset that was
  // measured before. A failure becomes a warning of LibTorch.
  ~Profiler();

  // Ends one step and begins the next. Call it after each iteration.
  //
  // Throws std::runtime_error if the trace of the cycle that ends cannot be
  // written. The profiler is in the next step then, and may be used further.
  // Throws std::logic_error after stop() and in another thread than that of the
  // construction.
  void step();

  // Ends the profile and writes the trace of the steps that were recorded last.
  // Throws as step() does. Does nothing the second time.
  void stop();

  // Returns the number of steps that have ended.
  int64_t step_number() const;
  // Returns what happens in this step; `none` after stop().
  ProfilerAction action() const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

namespace internal {

// Lets `lockstep profile` ask this process for a profile.
bool provide_profiler_on_demand();
inline const bool provides_profiler_on_demand = provide_profiler_on_demand();

// If a tool such as Nsight Systems records NVTX ranges of this process, shows
// it the library's spans as ranges of the domain "lockstep". Returns whether
// there is such a tool.
bool emit_nvtx_ranges();
inline const bool emits_nvtx_ranges = emit_nvtx_ranges();

}  // namespace internal

}  // namespace lockstep
