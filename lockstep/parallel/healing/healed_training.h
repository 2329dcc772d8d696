#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/training_state.h"

namespace lockstep {

// A loss of ranks after which training went on.
struct Healing {
  // "rank 1 failed: killed by SIGKILL (exit code 137)"
  std::string cause{};
  std::vector<int> replaced{};  // the ranks that are new processes
  int ranks{0};  // fewer than before if the job goes on without those it lost
  // The rank that the others copied; -1 if each rank has its own state again,
  // because the training is divided.
  int state_from{0};
  // Whether this rank does its part of the step again: with other samples if
  // there are fewer ranks.
  bool repeated{false};
  std::chrono::microseconds took{};  // from the failure to the next attempt
};

struct HealedTrainingOptions {
  // On several hosts: whether a rank of another host also keeps a copy of what
  // each rank has of its own. Then a lost host is healed with its generators
  // and buffers, and if the training is divided. Each step sends this state,
  // and waits until it has arrived. The hosts must have as many ranks each; the
  // same on all ranks.
  bool buddy_copies{false};
};

// A training that goes on when a rank dies. Under
//
//   lockstep run --nproc-per-node=2 --standby=1 --heal --max-restarts=20 train
//
// a standby process takes the place of the rank that died. The other ranks keep
// their processes and their memory: what they had begun is begun again, with
// the new rank, whose state they give to it. The result is that of a training
// in which nobody died, bit by bit.
//
//   lockstep::TrainingState state{.model = model.ptr(),
//                                 .optimizer = &optimizer,
//                                 .items = {{"sampler", sampler}}};
//   lockstep::load_snapshot("snapshots/", state);
//   lockstep::HealedTraining training(state);
//   for (int64_t epoch = state.next_epoch(); epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     while (const auto* batch = training.next(loader)) {
//       training.run(
//           [&] {  // computes: may be called again with the same batch
//             optimizer.zero_grad();
//             loss(ddp->forward(batch->data), batch->target).backward();
//           },
//           [&] {  // updates: the step counts once this has returned
//             optimizer.step();
//             ++state.step;
//           });
//       if (state.step % 100 == 0) {
//         training.run([&] { lockstep::save_snapshot("snapshots/", state); });
//       }
//     }
//     state.epochs_run = epoch;
//   }
//
// With --heal=shrink the others go on without the rank that died if no process
// takes its place. get_rank() and get_world_size() follow. The result is that
// of a training that has saved a snapshot after the last step and was restarted
// with fewer ranks: those share the samples that no step was made with. Groups
// that have lost a rank are of no use any more (LostGroupError,
// comm/reconfigure.h).
//
// Without --heal, and in a process that was started alone, the same program
// behaves as if the functions were called directly; if a rank dies then, the
// launcher restarts all from the snapshot.
//
// The contract:
//
// - Whatever changes the objects of `state`, and every collective, is in run().
//   Between its calls a program only decides what to do next, by `state`, the
//   loader and constants, in the same way on all ranks: the process that takes
//   a place starts at the top of the loop and passes over the calls that the
//   others have completed (the functions are not called there).
//   `step` is counted in `update`, `epochs_run` between the calls.
// - `compute` may be called several times with the same batch. It may change
//   gradients, the module's buffers and random generators, which are restored
//   before it is called again, and nothing else: std::logic_error names a
//   parameter that it has changed.
// - Gradients of parameters that `update` does not change are kept for the next
//   call, so that they can be accumulated.
// - `update` changes the state. It is called after all ranks have completed
//   `compute`, once unless the state is taken back first. Collectives in it are
//   possible. If a rank dies in one before any other rank has completed
//   `update`, no rank has a whole state any more: unless the training is
//   divided, run() throws std::runtime_error on all ranks, which begin again
//   from the snapshot.
// - What is printed or logged in a function is printed again with it. Random
//   numbers are drawn in `compute`. If `update`, or a function alone, draws
//   some or changes buffers of the model, and a rank dies in it, all begin
//   again from the snapshot.
// - Groups, wrappers, optimizers and a SnapshotSaver are made before this
//   object, in the same order on all ranks, and not inside run(). If a new
//   process has made another number of wrappers and savers than the others,
//   run() throws std::runtime_error on all ranks.
//
// Each rank keeps a copy of its generators' states, of the buffers that a
// function changed and of kept gradients, in memory that outlives its process
// (healing_place.h). No copy of parameters or optimizer state is made as long
// as nobody dies, unless the training is *divided*: a rank has state that no
// other rank has (FullyShard, ZeroRedundancyOptimizer, tensor parallelism,
// pipelines, PostLocalSGDOptimizer, set_placement(Own), items that are
// per_rank()). Then each rank copies all its state into that memory after each
// `update`, and run() returns when all ranks have; the memory has two such
// copies. If a rank dies, all ranks take their copies of the last step of which
// all have one, and do the step after it again. With buddy_copies all these
// copies also go to the rank with the same local rank on the next host, into
// the memory of its place.
//
// Blocking: run() and the constructor wait for the launcher's replacement of a
// rank, 60 s at most (10 s if no rank is known to be gone), and for the other
// ranks, for the default group's timeout.
//
// Threads: the one that trains.
class HealedTraining {
 public:
  // Collective. `state` must outlive this object. In a process that takes the
  // place of one that died, joins the others and takes their state.
  //
  // Throws std::invalid_argument if a group, or a part of `state`, cannot be
  // healed: samplers that are per_rank(), an optimizer that snapshots cannot
  // hold; if `state` lacks a module that is wrapped; if buddy_copies are asked
  // for and the hosts differ in their numbers of ranks; if the ranks of several
  // hosts differ in buddy_copies; std::logic_error if there is another
  // HealedTraining. Throws std::system_error if the
  // system lacks the memory for the copies, or its limit on the size of files
  // (ulimit -f) is too low for them. Without --heal nothing is checked.
  explicit HealedTraining(TrainingState& state,
                          HealedTrainingOptions options = {});
  HealedTraining(const HealedTraining&) = delete;
  HealedTraining& operator=(const HealedTraining&) = delete;
  ~HealedTraining();

  // Returns the next batch of a loop over `loader`, which begins with the first
  // call, or null at its end, to which all ranks must come; then the next call
  // begins another loop. So does one after the program has left the loop and
  // has selected another epoch, if `state` has one sampler. The batch stays
  // valid until the next call. `loader` is a DataLoader, or has its begin() and
  // end(). The loader's sampler must be one of TrainingState::items. Throws
  // std::logic_error if a loop over another loader has not ended.
  template <class Loader>
  auto next(Loader& loader) {
    using Iterator = decltype(loader.begin());
    auto* pass =
        begin_iteration<Iterator>(loader, [&] { return loader.begin(); });
    return pass != nullptr ? std::addressof(std::as_const(**pass)) : nullptr;
  }

  // Calls `compute` and, once all ranks have completed it, `update`. Returns
  // when this rank has completed both, or has the state of one that has. An
  // exception that does not come from a group passes through, and so does one
  // that cannot be healed.
  void run(const std::function<void()>& compute,
           const std::function<void()>& update);

  // The same for a function that is neither: a snapshot, an evaluation. It
  // changes nothing in `state`, and may be called several times. Throws
  // std::logic_error if it has changed parameters or gradients. Both also throw
  // it inside a function of run().
  void run(const std::function<void()>& function);

  // Returns the healings in which this process took part.
  const std::vector<Healing>& healings() const;

 private:
  class Work;

  template <class Iterator, class Loader, class Begin>
  Iterator* begin_iteration(Loader& loader, const Begin& begin) {
    const bool begun = tell_next(std::addressof(loader), [&] {
      pass_.reset();
      pass_ = std::make_shared<Iterator>(begin());
    });
    if (!begun) ++*std::static_pointer_cast<Iterator>(pass_);
    auto* pass = std::static_pointer_cast<Iterator>(pass_).get();
    if (*pass != loader.end()) return pass;
    pass_.reset();
    tell_end();
    return nullptr;
  }
  // Say that next() begins, before a batch is taken from the loader, and that
  // it will return null. The first one calls `begin_pass` and returns true if
  // another loop begins.
  bool tell_next(const void* loader, const std::function<void()>& begin_pass);
  void tell_end();

  std::unique_ptr<Work> work_;
  std::shared_ptr<void> pass_;
};

}  // namespace lockstep
