#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

// How the work grows with the number of processes.
enum class Scaling {
  weak,    // a step has more samples: each process computes as many as one does
  strong,  // a step has as many samples as that of one process
};
std::string_view name_of(Scaling scaling);  // "weak", "strong"

// The kind of program that computes.
enum class ScalingSide {
  ranks,     // `nproc` processes of one thread each
  threads,   // one process with `nproc` threads
  compared,  // the command of --compare
};
std::string_view name_of(ScalingSide side);  // "ranks", "threads", "compared"

// One thing to measure.
struct ScalingCase {
  Scaling scaling;
  ScalingSide side;
  int nproc;
  std::vector<std::string> command;  // the program and its arguments

  // How many processes write a summary (worker/training_counters.h).
  int processes() const { return side == ScalingSide::threads ? 1 : nproc; }
  // "2 ranks", "1 process, 2 threads", "compared, 2".
  std::string label() const;
};

// The measurements that the user wants.
struct ScalingPlan {
  std::vector<int> nproc;  // ascending, from 1 on
  std::vector<std::string> command;
  std::string compare{};  // for a shell; empty if there is none
};

// Returns `text` with these replaced, for `nproc` processes that compute a step
// together:
//
//   {nproc}           their number
//   {batch:64}        the samples of a process in a step: 64 (weak), 64 / nproc
//                     (strong)
//   {global_batch:64} those of all processes: 64 * nproc (weak), 64 (strong)
//
// `threads` of a single process stand for as many processes: both kinds of
// batch are that of all. Throws std::invalid_argument if a batch is not a
// number from 1 to 2^31 - 1, or 64 is not a multiple of the number of
// processes.
std::string expand(std::string_view text, Scaling scaling, ScalingSide side,
                   int nproc);

// Whether `text` says the size of a batch. Otherwise the program is run as it
// is given, and that is weak scaling.
bool has_batch(std::string_view text);

// Returns what must be measured: weak scaling, and if the command has a batch,
// strong scaling, too. The two have the case of one process in common, which is
// the first. Throws std::invalid_argument.
std::vector<ScalingCase> cases_of(const ScalingPlan& plan);

}  // namespace lockstep::internal
