#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lockstep/optim/lr_scheduler/lr_scheduler.h"
#include "lockstep/optim/lr_scheduler/scheduler_state.h"
#include "lockstep/state/resumable_scheduler.h"

namespace lockstep::optim {

// Whether a lower or a higher metric is better.
enum class PlateauMode { min, max };

// Whether ReduceLROnPlateauOptions::threshold is a part of the best metric or
// in the metric's own unit.
enum class ThresholdMode { rel, abs };

// The arguments of torch.optim.lr_scheduler.ReduceLROnPlateau (PyTorch
// documentation).
struct ReduceLROnPlateauOptions {
  // Which of two metrics is the better one.
  PlateauMode mode{PlateauMode::min};

  // The factor of a reduction; below 1.
  double factor{0.1};

  // The number of epochs without improvement that are tolerated.
  int64_t patience{10};

  // A metric must be better than the best one by this much to be an
  // improvement.
  double threshold{1e-4};
  ThresholdMode threshold_mode{ThresholdMode::rel};

  // The number of epochs after a reduction in which none is counted as one
  // without improvement.
  int64_t cooldown{0};

  // The rates are not reduced below this one.
  PerGroup<double> min_lr = 0.0;

  // A reduction by no more than this is left out.
  double eps{1e-8};
};

// Reduces the rates when a metric, such as the loss of the validation set, has
// stopped improving. lr_scheduler.h says what holds for all schedulers.
//
// Give step() the same metric on every rank, or rates will differ: compute() of
// lockstep/metrics returns the same on all.
class ReduceLROnPlateau final : public ResumableScheduler {
 public:
  // Throws std::invalid_argument for a factor of 1 or more, and for a list
  // min_lr that does not have a value for each group.
  explicit ReduceLROnPlateau(torch::optim::Optimizer& optimizer,
                             const ReduceLROnPlateauOptions& options = {});

  // Call it after each epoch. A metric that is not a number is not an
  // improvement.
  void step(double metric);

  const std::vector<double>& get_last_lr() const { return last_lr_; }
  int64_t last_epoch() const { return last_epoch_; }  // calls of step()
  double best() const { return best_; }
  int64_t num_bad_epochs() const { return num_bad_epochs_; }
  bool in_cooldown() const { return cooldown_counter_ > 0; }

  StateTree state_dict() const override;
  std::function<void()> prepare_load(const StateTree& state) override;

 private:
  bool is_better(double metric) const;
  void reduce_lr();
  internal::StateFields state_fields();

  std::unique_ptr<internal::SchedulerGroups> groups_;
  PlateauMode mode_;
  double factor_;
  int64_t patience_;
  double threshold_;
  ThresholdMode threshold_mode_;
  int64_t cooldown_;
  double eps_;
  std::optional<double> default_min_lr_;
  std::vector<double> min_lrs_;
  double mode_worse_;
  double best_;
  int64_t cooldown_counter_ = 0;
  int64_t num_bad_epochs_ = 0;
  int64_t last_epoch_ = 0;
  std::vector<double> last_lr_;
};

}  // namespace lockstep::optim
