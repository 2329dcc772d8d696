#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/state/state_tree.h"

namespace lockstep {

// The state of a GradScaler: that of torch.amp.GradScaler with the same names,
// except for `growth_tracker`, which Python calls `_growth_tracker`.
struct GradScalerState {
  double scale{65536.0};
  double growth_factor{2.0};
  double backoff_factor{0.5};
  int64_t growth_interval{2000};
  // Steps without infinity or NaN since the scale last changed.
  int64_t growth_tracker{0};

  bool operator==(const GradScalerState&) const = default;
};

// Converts the state to one line of JSON, for the metadata of a snapshot, and
// back; the numbers that are read are the same bit by bit. The JSON is what
// Python's json.dumps(scaler.state_dict()) writes, and JSON from there can be
// read.
//
// Both throw std::invalid_argument: to_json() for a number that is not finite,
// which JSON does not have; grad_scaler_state_from_json() for text that is not
// such an object, with the entry that is missing or wrong. Other entries are
// ignored.
//
// to_state_tree() and from_state_tree() are for a scaler among the items of a
// TrainingState; the second throws as grad_scaler_state_from_json() does.
StateTree to_state_tree(const GradScalerState& state);
void from_state_tree(const StateTree& tree, GradScalerState& state);
std::string to_json(const GradScalerState& state);
GradScalerState grad_scaler_state_from_json(std::string_view text);

// The options of torch.amp.GradScaler (PyTorch documentation, "Automatic Mixed
// Precision package", Gradient Scaling), and process_group.
struct GradScalerOptions {
  // ---- Behaviour ----

  // The device that training runs on. If LibTorch sees no such
  // accelerator, the scaler is disabled, as in Python; is_enabled() tells. None
  // means the device of the first loss that is scaled (in Python: kCUDA).
  std::optional<c10::DeviceType> device{};

  // The scale of the first steps; above 0, finite. Most programs leave it.
  double init_scale{65536.0};

  // The scale is multiplied by this factor after `growth_interval` consecutive
  // steps without infinity or NaN; above 1. Most programs leave it.
  double growth_factor{2.0};

  // The scale is multiplied by this factor after a step with infinity or NaN;
  // below 1. Most programs leave it.
  double backoff_factor{0.5};

  // See growth_factor. Lower it for a training of few steps.
  int64_t growth_interval{2000};

  // If false, nothing is scaled, step() only steps, and the other functions do
  // nothing: one loop for runs with and without float16.
  bool enabled{true};

  // ---- Beyond Python ----

  // The ranks that agree on whether there was an infinity or NaN, for an
  // optimizer that is not sharded. All of them unscale, or step, equally often.
  // Give the group of the ranks that use the scaler if these are not all, and
  // split_group({{get_rank()}}), a group of this rank alone, if a rank is to
  // decide by itself: beside Python ranks, which do not agree, but have equal
  // gradients. Null means the default group, if there is one.
  ProcessGroupPtr process_group{};
};

// Keeps small gradients from vanishing in float16: losses are multiplied by a
// scale before backward, and gradients are divided by it before the optimizer's
// step. A step whose gradients hold an infinity or NaN is skipped, and the
// scale is reduced; after many steps without one the scale is increased.
//
//   scaler.scale(loss).backward();
//   scaler.unscale_(optimizer);                     // only to clip
//   lockstep::clip_grad_norm_(optimizer, 1.0);
//   scaler.step(optimizer);
//   scaler.update();
//
// Several optimizers may share one scaler: call step() for each, then update()
// once. A parameter that an optimizer names twice is unscaled once. The scaler
// knows an optimizer by its address from unscale_() or step() until update(),
// so the optimizer must not move in between.
//
// Ranks. unscale_(), or step() if it unscales, is collective: the ranks of
// `process_group` agree on whether any gradient is infinite or NaN, so that all
// ranks step or none does, and all scales stay equal. For a sharded optimizer
// (GradientShards) each rank unscales the gradients that it owns, and the ranks
// of its shard_group() agree instead. For parameters that are parts of larger
// ones (FSDP, tensor parallelism, the stages of a pipeline) all ranks that have
// a part of the model agree, too. A rank may have no gradients if another rank
// has some.
//
// Pipelines. The loss is scaled where it is computed, in PipelineOptions::loss,
// so on the rank of the last stage only. The other ranks need not call scale().
// A rank whose stages have no parameters has an optimizer of
// Pipeline::empty_parameter(), and takes part without gradients.
//
// Parameters are float32 or wider (bfloat16 is accepted, too). Gradients in
// float16 are refused: what overflowed or vanished in them was lost before they
// could be unscaled. Gradients may be sparse, and on several devices.
//
// Blocking: step(), found_inf(), get_scale() and state_dict() wait for the
// device; the other functions do not, except when ranks have to agree. Threads:
// one at a time. Errors: std::invalid_argument for arguments; std::logic_error
// for calls in a wrong order, listed at each function, after which nothing has
// changed; c10::DistBackendError if ranks cannot agree.
class GradScaler {
 public:
  // Throws std::invalid_argument for factors and scales outside the ranges
  // above.
  explicit GradScaler(const GradScalerOptions& options = {});

  // Returns `output` multiplied by the scale, differentiably. The first call of
  // either overload places the scale on its tensor's device.
  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(at::TensorList outputs);

  // Divides the optimizer's gradients by the scale and looks for infinity and
  // NaN. Call it if something (clipping) must happen between backward and step;
  // otherwise step() does it. Gradients must be complete: accumulated gradients
  // are unscaled after the last backward.
  //
  // Throws std::logic_error before the first scale(), and for an optimizer that
  // was unscaled or stepped since the last update(); std::invalid_argument for
  // gradients in float16. If one rank has such gradients, all ranks that agree
  // with it throw; they may have unscaled their gradients already, so compute
  // the gradients again. The same holds for the first scale(): one of the ranks
  // that agree must have called it.
  void unscale_(torch::optim::Optimizer& optimizer);

  // Calls unscale_(), unless that was called, and optimizer.step(), unless
  // there was an infinity or NaN. Returns the result of optimizer.step(), which
  // is an undefined tensor without a closure; also returns an undefined tensor
  // if the step was skipped.
  //
  // Throws std::logic_error before the first scale(), for an optimizer that was
  // stepped since the last update(), and if none of its parameters has a
  // gradient; std::invalid_argument for a closure, because the gradients that
  // it computes would not have been checked. A disabled scaler passes the
  // closure on.
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  torch::optim::Optimizer::LossClosure closure = nullptr);

  // Adapts the scale, or sets it to `new_scale`. Call it after the last step()
  // of an iteration.
  //
  // Throws std::logic_error before the first scale(), and, without a new scale,
  // if no optimizer with gradients was unscaled or stepped since the last
  // update(). Throws std::invalid_argument if a number is not above 0 and
  // finite, or if a tensor does not have exactly one element, is not on the
  // scale's type of device, or requires a gradient (the value of a tensor is
  // not checked).
  void update();
  void update(double new_scale);
  void update(const at::Tensor& new_scale);

  // Returns whether unscale_() or step() since the last update() found an
  // infinity or NaN, in which case step() skips this optimizer. For
  // learning-rate schedulers, which should not advance then. False if the
  // scaler is disabled. Waits for the device. Throws std::logic_error if
  // neither function was called, or if the optimizer had no gradients.
  bool found_inf(const torch::optim::Optimizer& optimizer) const;

  // Returns the scale; 1 if the scaler is disabled.
  double get_scale() const;

  // The setters do not check their values, as in Python: a growth factor of 1
  // keeps the scale from growing.
  double get_growth_factor() const { return options_.growth_factor; }
  void set_growth_factor(double factor) { options_.growth_factor = factor; }
  double get_backoff_factor() const { return options_.backoff_factor; }
  void set_backoff_factor(double factor) { options_.backoff_factor = factor; }
  int64_t get_growth_interval() const { return options_.growth_interval; }
  void set_growth_interval(int64_t steps) { options_.growth_interval = steps; }

  bool is_enabled() const { return options_.enabled; }

  // Call it between update() and the next scale(). Returns none if the scaler
  // is disabled.
  std::optional<GradScalerState> state_dict() const;

  // Also forgets what was unscaled or stepped since the last update(). Does
  // nothing if this scaler is disabled. Throws std::invalid_argument for an
  // empty state, which a disabled scaler has saved.
  void load_state_dict(const std::optional<GradScalerState>& state);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct OptimizerState {
    Stage stage = Stage::kReady;
    // One element for each device that has gradients; above 0: infinity or NaN
    // was found. Empty if the optimizer has no gradients.
    std::vector<at::Tensor> found_inf;
  };

  void place_scale(c10::Device device);
  void require_scale(const char* function) const;
  void unscale(torch::optim::Optimizer& optimizer, const char* function);
  std::vector<at::Tensor> unscale_gradients(torch::optim::Optimizer& optimizer,
                                            const char* function);

  GradScalerOptions options_;  // current values, which setters change
  int64_t init_growth_tracker_ = 0;
  bool has_scaled_ = false;  // on this rank
  // float32 and int32, 0-dimensional; undefined until the first scale(), or
  // unscale_() of parts.
  at::Tensor scale_;
  at::Tensor growth_tracker_;
  std::map<const torch::optim::Optimizer*, OptimizerState> optimizers_;
};

}  // namespace lockstep
