#pragma once

#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/training_state.h"

namespace lockstep {

// How one save of a SnapshotSaver has ended.
struct SavedSnapshot {
  // The file, or the folder of the one snapshot, that was written. Empty if the
  // save has failed.
  std::string path{};
  // Why it has failed, in one line; empty if it has not.
  std::string error{};
  // TrainingState::step when it began.
  int64_t step{0};
  // From the call of save() until everything was on the disk.
  std::chrono::duration<double> total{};
  // How long the training loop has waited for it: in save() and in
  // wait_for_copy().
  std::chrono::duration<double> blocked{};
};

// How far this rank's part of a save in a folder has come. (Of a file nothing
// is known.)
struct SnapshotProgress {
  int64_t step{0};
  // Bytes of tensors. When all are written, the disk may still be working.
  uint64_t bytes_written{0};
  uint64_t bytes_total{0};
};

struct SnapshotSaverOptions {
  // ---- Behaviour ----

  // The ranks that save together. Most programs leave it. Null means the
  // default group, or this process alone if there is none.
  ProcessGroupPtr group{};

  // is_due() is true whenever TrainingState::step has reached another multiple
  // of this number. 0 means never.
  int64_t every_steps{0};

  // is_due() is true when this time has passed since the last save began. Rank
  // 0's clock decides. None means never.
  std::optional<std::chrono::milliseconds> every{};

  // If one of these signals comes to any rank, is_due() and stop_requested()
  // become true on all ranks. A signal for which the program has a handler of
  // its own is left to it. With SIGTERM launchers and schedulers stop a job;
  // with SIGUSR2 a scheduler can announce that.
  std::vector<int> stop_signals{SIGTERM, SIGUSR2};

  // As in SnapshotOptions, for folders of snapshots.
  int64_t keep_last{0};
  int64_t keep_every{0};

  // Called on each rank when a save has ended, by the next call of this object,
  // in the thread of that call; the destructor is such a call, so what the
  // function uses must live longer than the saver. Set it to count or to show
  // saves, and to see those that have failed. Without it rank 0 warns
  // (TORCH_WARN) of a save that has failed.
  std::function<void(const SavedSnapshot&)> on_saved{};

  // Called on each rank about once a second while its files are written, and
  // once after that, by the thread that writes; must not throw. Set it to show
  // long saves in a folder.
  std::function<void(const SnapshotProgress&)> on_progress{};

  // ---- Performance ----

  // Whether save() only copies what is to be saved, and a thread writes the
  // copy while training goes on. That takes as much memory as this rank's part
  // of the snapshot.
  bool in_background{true};

  // Whether the thread also makes the copy of parameters and optimizer state.
  // save() then returns almost at once, and the program must call
  // wait_for_copy() before it changes them: before optimizer.step(), or before
  // backward() if the step is part of it. Set it to true if forward and
  // backward take longer than copying. A save during which something has
  // changed fails, if LibTorch has counted the change: in-place operations
  // count when they have ended, the optimizers of lockstep::optim before they
  // write; writing through data() or a pointer does not count.
  bool overlap_copy{false};
};

// Saves snapshots of a training while it goes on: every so many steps, every so
// many minutes, and when the job is told to stop.
//
//   lockstep::load_snapshot("snapshots/", state);
//   lockstep::SnapshotSaver saver("snapshots/", state,
//                                 {.every_steps = 1000, .keep_last = 3});
//   for (auto& batch : loader) {
//     ... train ...
//     ++state.step;
//     if (saver.is_due()) {
//       state.sampler_state = sampler.state_dict();
//       saver.save();
//     }
//     if (saver.stop_requested()) break;
//   }
//   saver.finish();
//
// Files and folders are those of save_snapshot(), with the same promises. If a
// save fails, because the disk is full or a rank cannot write, the older
// snapshots stay, training goes on, and the next save tries again;
// on_saved tells. A mistake of the program (a TrainingState without a model, an
// optimizer that snapshots cannot hold) is thrown, as std::invalid_argument on
// every rank, by the constructor if it is known then. Replicas that differ
// (save_snapshot()) are a failed save.
//
// At most one save is under way: save() waits until the one before has ended,
// if the disk is slower than the training.
//
// The calls that are collective must be made by all ranks, at the same place in
// the program. The thread talks to the other ranks through the store, so the
// training may use the group meanwhile. All calls belong to one thread.
class SnapshotSaver {
 public:
  // Collective. `state` is read by each save, so it must outlive this object,
  // and so must the group. Throws std::invalid_argument, on every rank, if an
  // option is out of range or not for such a path, and if a save would throw
  // for what is known already: names, texts and dtypes that the format cannot
  // hold, a model that is not set or is divided over ranks.
  SnapshotSaver(std::string path, const TrainingState& state,
                SnapshotSaverOptions options = {});

  // Waits until a save that is under way has ended, and tells how. From then on
  // the signals do what they did before, unless another saver catches them.
  ~SnapshotSaver();

  SnapshotSaver(const SnapshotSaver&) = delete;
  SnapshotSaver& operator=(const SnapshotSaver&) = delete;

  // Returns whether a snapshot should be saved now; the same on all ranks. Call
  // it once after each optimizer step. It is collective, and costs an
  // all_reduce of a few bytes, if `every` or `stop_signals` are set.
  //
  // In a HealedTraining a save that a rank's death has interrupted is made up
  // for: the function that was interrupted is called again and finds the same
  // due, and if a save in the background was lost, the next call for another
  // step returns true. Call is_due() inside HealedTraining::run(); outside only
  // if it is not collective.
  bool is_due();

  // Whether a signal has asked the job to stop. It is true from the same call
  // of is_due() on, on all ranks. Save, and end the training.
  bool stop_requested() const;

  // Collective. Begins to save the present state; with `in_background` it
  // returns when a copy is made, or earlier with `overlap_copy`, and otherwise
  // when everything is on the disk. The state may change from then on. Blocks
  // while the save before is under way.
  void save();

  // With `overlap_copy`: blocks until the copy for the last save is made, and
  // helps to make it. Costs nothing otherwise.
  void wait_for_copy();

  // Blocks until the save that is under way, if there is one, has ended.
  void wait();

  // Collective, for the end of the training. Saves the present state and waits,
  // unless it is saved: save() was called after the last is_due(), has
  // succeeded, and TrainingState::step is the same. Throws the errors of
  // save_snapshot() if the state was not saved.
  void finish();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
