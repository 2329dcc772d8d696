#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "lockstep/amp/grad_scaler_state.h"
#include "lockstep/comm/process_group.h"

namespace lockstep {

// After torch.amp.GradScaler (PyTorch documentation, "Automatic Mixed Precision
// package", Gradient Scaling).
struct GradScalerOptions {
  // Where training runs. For kCUDA where LibTorch sees no GPU the scaler is
  // disabled, as Python's; is_enabled() tells.
  c10::DeviceType device{c10::DeviceType::CUDA};
  double init_scale{65536.0};  // above 0, finite
  // By which the scale is multiplied after `growth_interval` steps without
  // infinity or NaN, one after another; above 1.
  double growth_factor{2.0};
  // The same after a step with; below 1.
  double backoff_factor{0.5};
  int64_t growth_interval{2000};
  // False: nothing is scaled, step() steps, the other functions do nothing.
  bool enabled{true};
  // For optimizers that are not sharded: the ranks that agree whether there was
  // an infinity or NaN, where each has gradients of its own. None: each rank
  // decides by its own gradients, which is right where they are the same on
  // all ranks, as behind DistributedDataParallel. Not the default group.
  ProcessGroupPtr process_group{};
};

// Keeps small gradients from vanishing in float16: losses are multiplied by a
// scale before backward, gradients divided by it before the optimizer's step. A
// step whose gradients hold an infinity or NaN is skipped, and the scale made
// smaller; after many that do not, it is made larger.
//
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                     // only to clip
//   lockstep::clip_grad_norm_(optimizer, 1.0);
//   scaler.step(optimizer);
//   scaler.update();
//
// Several optimizers may share one scaler: step() for each, then one update().
// A parameter that an optimizer names twice is unscaled once. An optimizer is
// known by its address from unscale_() or step() until update(), and must not
// move meanwhile.
//
// Ranks. A sharded optimizer (GradientShards) is unscaled where this rank owns
// its gradients, and whether one is infinite or NaN is agreed over its
// shard_group(), so that all ranks step or none, and all scales stay equal:
// unscale_(), or step() where it does that, is collective then, as it is with
// `process_group`. A rank may have no gradients if another has some.
//
// Parameters are float32 or wider (bfloat16 is taken, too); gradients in
// float16 are refused, for what overflowed or vanished in them is lost before
// the scale is taken out. Gradients may be sparse, and of several devices.
//
// Blocks: step(), found_inf(), get_scale() and state_dict() wait for the
// device, others do not, but where ranks agree. One thread. Errors:
// std::invalid_argument for what is given; std::logic_error for calls out of
// order, each named at its function: nothing has changed then;
// c10::DistBackendError if ranks cannot agree.
class GradScaler {
 public:
  // Throws std::invalid_argument for factors and scales that are not as above.
  explicit GradScaler(const GradScalerOptions& options = {});

  // `output`, multiplied by the scale, differentiably. The first call, here or
  // below, settles on whose device the scale lives.
  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  // Divides the optimizer's gradients by the scale and looks for infinity and
  // NaN. For what comes between backward and step (clipping); step() does it
  // itself otherwise. Gradients must be complete: one that accumulates is
  // unscaled behind the last backward.
  //
  // Throws std::logic_error before the first scale(), and for an optimizer that
  // was unscaled or stepped since the last update(); std::invalid_argument for
  // gradients in float16, on all ranks that agree if one rank has some (other
  // gradients may have been unscaled there: begin the step anew).
  void unscale_(torch::optim::Optimizer& optimizer);

  // unscale_(), unless it was called, and optimizer.step(), unless there was an
  // infinity or NaN. Returns what optimizer.step() did: an undefined tensor
  // where it takes no closure, as where it was skipped.
  //
  // Throws std::logic_error before the first scale(), for an optimizer that was
  // stepped since the last update(), and where none of its parameters has a
  // gradient; std::invalid_argument for a closure, which would compute
  // gradients that nobody has looked at. A disabled scaler hands it on.
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  torch::optim::Optimizer::LossClosure closure = nullptr);

  // Behind the last step() of an iteration: adapts the scale, or sets it.
  //
  // Throws std::logic_error before the first scale(), and, without a new scale,
  // if no optimizer was unscaled or stepped since the last update();
  // std::invalid_argument for a number that is not above 0 and finite, and for
  // a tensor that is not of one element, of the option's device and without
  // requires_grad (its number is not looked at).
  void update();
  void update(double new_scale);
  void update(const at::Tensor& new_scale);

  // Whether unscale_() or step() since the last update() found an infinity or
  // NaN, and step() so skips this optimizer: for schedulers, which should not
  // go on then. False where disabled. Waits for the device. Throws
  // std::logic_error if neither was called.
  bool found_inf(const torch::optim::Optimizer& optimizer) const;

  // 1 where disabled.
  double get_scale() const;

  // Not checked, as in Python: a growth factor of 1 keeps the scale from
  // growing.
  double get_growth_factor() const { return options_.growth_factor; }
  void set_growth_factor(double factor) { options_.growth_factor = factor; }
  double get_backoff_factor() const { return options_.backoff_factor; }
  void set_backoff_factor(double factor) { options_.backoff_factor = factor; }
  int64_t get_growth_interval() const { return options_.growth_interval; }
  void set_growth_interval(int64_t steps) { options_.growth_interval = steps; }

  bool is_enabled() const { return options_.enabled; }

  // Between update() and the next scale(). None where disabled.
  std::optional<GradScalerState> state_dict() const;

  // Does nothing where disabled. Throws std::invalid_argument if there is no
  // state: it was saved from a disabled scaler.
  void load_state_dict(const std::optional<GradScalerState>& state);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct OptimizerState {
    Stage stage = Stage::kReady;
    // One a device that has gradients; above 0: found. None: no gradients.
    std::vector<at::Tensor> found_inf;
  };

  void place_scale(const at::Tensor& output);
  void require_scale(const char* function) const;
  std::vector<at::Tensor> unscale_gradients(torch::optim::Optimizer& optimizer);

  GradScalerOptions options_;  // as the setters left them
  int64_t init_growth_tracker_ = 0;
  // float32 and int32, of no dimension; undefined until the first scale().
  at::Tensor scale_;
  at::Tensor growth_tracker_;
  std::map<const torch::optim::Optimizer*, OptimizerState> optimizers_;
};

}  // namespace lockstep
