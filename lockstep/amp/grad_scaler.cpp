#include "lockstep/amp/grad_scaler.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/amp/optimizer_gradients.h"
#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/init.h"

namespace lockstep {
namespace {

void check_scale(const char* name, double scale) {
  if (scale > 0 && std::isfinite(scale)) return;
  throw std::invalid_argument(std::string("GradScaler: ") + name + " is " +
                              std::to_string(scale) +
                              "; it must be above 0 and finite.");
}

// Copies of one tensor, one for each device, made at the first request.
class DeviceCopies {
 public:
  explicit DeviceCopies(at::Tensor original) : original_(std::move(original)) {}

  const at::Tensor& on(c10::Device device) {
    auto found = std::ranges::find(copies_, device, &at::Tensor::device);
    if (found != copies_.end()) return *found;
    return copies_.emplace_back(original_.to(original_.options().device(device),
                                             /*non_blocking=*/true,
                                             /*copy=*/true));
  }

  const std::vector<at::Tensor>& all() const { return copies_; }

 private:
  at::Tensor original_;
  std::vector<at::Tensor> copies_;
};

// LibTorch's kernel takes tensors of one device and dtype.
void unscale_in_place(const std::vector<at::Tensor>& gradients,
                      DeviceCopies& found_inf, DeviceCopies& inverse_scale) {
  std::vector<at::Tensor> dense;
  for (const auto& gradient : gradients) {
    dense.push_back(gradient.is_sparse() ? gradient._values() : gradient);
  }
  for (const auto& list : internal::by_device_and_dtype(dense)) {
    auto device = list.front().device();
    // The kernel takes both tensors through references that are not const.
    at::Tensor found = found_inf.on(device);
    at::_amp_foreach_non_finite_check_and_unscale_(list, found,
                                                   inverse_scale.on(device));
  }
}

std::logic_error not_scaled(const char* function, const char* where) {
  return std::logic_error(std::string("GradScaler::") + function +
                          ": no loss was scaled yet" + where +
                          ". Call scale(loss), and backward() on what it "
                          "returns, before this.");
}

at::Tensor sum_on(c10::Device device, const std::vector<at::Tensor>& numbers) {
  auto sum = at::zeros({}, at::TensorOptions(at::kFloat).device(device));
  for (const auto& number : numbers) {
    sum += number.to(device, /*non_blocking=*/true);
  }
  return sum;
}

using Json = nlohmann::json;

constexpr const char* kScale = "scale";
constexpr const char* kGrowthFactor = "growth_factor";
constexpr const char* kBackoffFactor = "backoff_factor";
constexpr const char* kGrowthInterval = "growth_interval";
constexpr const char* kGrowthTracker = "_growth_tracker";

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument(
      "The state of a GradScaler " + what +
      "; give the state_dict() of an enabled scaler, or its JSON.");
}

double finite(const char* name, double number) {
  if (std::isfinite(number)) return number;
  throw std::invalid_argument(std::string("to_json: the GradScaler's ") + name +
                              " is " + std::to_string(number) +
                              ", which JSON cannot hold; it must be finite.");
}

const Json& entry(const Json& object, const char* name) {
  auto found = object.find(name);
  if (found == object.end()) refuse(std::string("has no \"") + name + '"');
  return *found;
}

double number(const Json& object, const char* name) {
  const Json& value = entry(object, name);
  if (!value.is_number()) {
    refuse(std::string("has a \"") + name + "\" that is not a number");
  }
  return value.get<double>();
}

int64_t integer(const Json& object, const char* name) {
  const Json& value = entry(object, name);
  if (!value.is_number_integer()) {
    refuse(std::string("has a \"") + name + "\" that is not an integer");
  }
  return value.get<int64_t>();
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options) : options_(options) {
  options_.process_group.require_member();
  if (options_.device && *options_.device != at::kCPU &&
      options_.device != internal::visible_accelerator()) {
    options_.enabled = false;
  }
  if (!options_.enabled) return;
  check_scale("init_scale", options_.init_scale);
  if (!(options_.growth_factor > 1)) {
    throw std::invalid_argument(
        "GradScaler: growth_factor is " +
        std::to_string(options_.growth_factor) +
        "; it must be above 1. For a scale that does not grow, make "
        "growth_interval large.");
  }
  if (!(options_.backoff_factor < 1)) {
    throw std::invalid_argument("GradScaler: backoff_factor is " +
                                std::to_string(options_.backoff_factor) +
                                "; it must be below 1.");
  }
}

void GradScaler::place_scale(c10::Device device) {
  if (scale_.defined()) return;
  auto on_device = at::TensorOptions().device(device);
  scale_ = at::full({}, options_.init_scale, on_device.dtype(at::kFloat));
  growth_tracker_ =
      at::full({}, init_growth_tracker_, on_device.dtype(at::kInt));
}

void GradScaler::require_scale(const char* function) const {
  if (!scale_.defined()) throw not_scaled(function, "");
}

at::Tensor GradScaler::scale(const at::Tensor& output) {
  if (!options_.enabled) return output;
  place_scale(output.device());
  has_scaled_ = true;
  return output * scale_.to(output.device(), /*non_blocking=*/true);
}

std::vector<at::Tensor> GradScaler::scale(at::TensorList outputs) {
  if (!options_.enabled || outputs.empty()) return outputs.vec();
  place_scale(outputs.front().device());
  has_scaled_ = true;
  DeviceCopies scales(scale_);
  std::vector<at::Tensor> result;
  for (const auto& output : outputs) {
    result.push_back(output * scales.on(output.device()));
  }
  return result;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (options_.enabled) unscale(optimizer, "unscale_");
}

void GradScaler::unscale(torch::optim::Optimizer& optimizer,
                         const char* function) {
  auto& state = optimizers_[&optimizer];
  if (state.stage != Stage::kReady) {
    throw std::logic_error(
        std::string("GradScaler::unscale_: ") +
        (state.stage == Stage::kUnscaled ? "unscale_()" : "step()") +
        " was already called for this optimizer since the last update(). Call "
        "it once, between backward() and step().");
  }
  state.found_inf = unscale_gradients(optimizer, function);
  state.stage = Stage::kUnscaled;
}

std::vector<at::Tensor> GradScaler::unscale_gradients(
    torch::optim::Optimizer& optimizer, const char* function) {
  const at::NoGradGuard no_grad;
  auto gradients = internal::gradients_of(optimizer);
  auto group = gradients.shard_group != nullptr
                   ? gradients.shard_group
                   : internal::group_if_any(options_.process_group);
  if (group && group->size() == 1) group.reset();
  const bool agrees = group != nullptr || gradients.layouts.any();
  // Some rank must have scaled a loss: that of a pipeline is scaled on the rank
  // of its last stage only.
  if (agrees) place_scale(gradients.device);
  require_scale(function);
  bool half = std::ranges::any_of(gradients.tensors, [](const auto& gradient) {
    return gradient.scalar_type() == at::kHalf;
  });

  // The reciprocal is computed in float64, as in Python: a device that divides
  // in float32 may be off by one bit.
  DeviceCopies inverse_scale(
      scale_.to(at::kDouble).reciprocal().to(at::kFloat));
  DeviceCopies found_inf(at::zeros({}, scale_.options()));
  if (!half) unscale_in_place(gradients.tensors, found_inf, inverse_scale);

  auto result = found_inf.all();
  bool scaled = true;
  if (agrees) {
    auto found = sum_on(scale_.device(), result);
    auto numbers = at::stack(
        {found, at::full_like(found, !gradients.tensors.empty()),
         at::full_like(found, half), at::full_like(found, has_scaled_)});
    numbers = gradients.layouts.reduced(numbers, ReduceOp::MAX);
    if (group != nullptr) {
      numbers = internal::agreed(numbers, ReduceOp::MAX, group);
    }
    auto seen = numbers.cpu();
    half = seen[2].item<float>() > 0;
    scaled = seen[3].item<float>() > 0;
    result.clear();
    if (seen[1].item<float>() > 0) result.push_back(numbers[0].clone());
  }
  if (!scaled) {
    throw not_scaled(function, " by any of the ranks that agree");
  }
  if (half) {
    throw std::invalid_argument(
        "GradScaler: there are gradients in float16, on this rank or on "
        "another of its group; they cannot be unscaled without loss. Keep "
        "parameters in float32 and compute in float16 by autocast.");
  }
  return result;
}

at::Tensor GradScaler::step(torch::optim::Optimizer& optimizer,
                            torch::optim::Optimizer::LossClosure closure) {
  if (!options_.enabled) return optimizer.step(std::move(closure));
  if (closure) {
    throw std::invalid_argument(
        "GradScaler::step: a closure was given; an enabled scaler takes none. "
        "Compute loss and gradients before step(), or disable the scaler for "
        "this optimizer.");
  }
  auto& state = optimizers_[&optimizer];
  if (state.stage == Stage::kStepped) {
    throw std::logic_error(
        "GradScaler::step: step() was already called for this optimizer since "
        "the last update(). Call update() at the end of each iteration.");
  }
  if (state.stage == Stage::kReady) unscale(optimizer, "step");
  if (state.found_inf.empty()) {
    optimizers_.erase(&optimizer);
    throw std::logic_error(
        "GradScaler::step: no parameter of this optimizer has a gradient. Call "
        "backward() on a loss that depends on one, or leave the step out.");
  }
  at::Tensor loss;
  if (!found_inf(optimizer)) loss = optimizer.step();
  state.stage = Stage::kStepped;
  return loss;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  require_scale("update");
  std::vector<at::Tensor> found_inf;
  for (const auto& [optimizer, state] : optimizers_) {
    found_inf.insert(found_inf.end(), state.found_inf.begin(),
                     state.found_inf.end());
  }
  if (found_inf.empty()) {
    throw std::logic_error(
        "GradScaler::update: no optimizer with gradients was stepped or "
        "unscaled since the last update(). Call step() for each optimizer "
        "before this.");
  }
  at::_amp_update_scale_(scale_, growth_tracker_,
                         sum_on(scale_.device(), found_inf),
                         options_.growth_factor, options_.backoff_factor,
                         options_.growth_interval);
  optimizers_.clear();
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  require_scale("update");
  check_scale("new_scale", new_scale);
  scale_.fill_(new_scale);
  optimizers_.clear();
}

void GradScaler::update(const at::Tensor& new_scale) {
  if (!options_.enabled) return;
  require_scale("update");
  if (!new_scale.defined() ||
      new_scale.device().type() != scale_.device().type() ||
      new_scale.numel() != 1 || new_scale.requires_grad()) {
    throw std::invalid_argument(
        "GradScaler::update: new_scale must be a tensor of one element, on " +
        c10::DeviceTypeName(scale_.device().type(), /*lower_case=*/true) +
        ", without requires_grad; give such a tensor, or a double.");
  }
  scale_.copy_(new_scale.reshape({}));
  optimizers_.clear();
}

bool GradScaler::found_inf(const torch::optim::Optimizer& optimizer) const {
  if (!options_.enabled) return false;
  auto found = optimizers_.find(&optimizer);
  if (found == optimizers_.end() || found->second.found_inf.empty()) {
    throw std::logic_error(
        "GradScaler::found_inf: this optimizer was neither unscaled nor "
        "stepped since the last update(). Ask between step() and update().");
  }
  return std::ranges::any_of(found->second.found_inf, [](const auto& number) {
    return number.template item<float>() > 0;
  });
}

double GradScaler::get_scale() const {
  if (!options_.enabled) return 1.0;
  return scale_.defined() ? scale_.item<double>() : options_.init_scale;
}

std::optional<GradScalerState> GradScaler::state_dict() const {
  if (!options_.enabled) return std::nullopt;
  return GradScalerState{.scale = get_scale(),
                         .growth_factor = options_.growth_factor,
                         .backoff_factor = options_.backoff_factor,
                         .growth_interval = options_.growth_interval,
                         .growth_tracker = growth_tracker_.defined()
                                               ? growth_tracker_.item<int64_t>()
                                               : init_growth_tracker_};
}

void GradScaler::load_state_dict(const std::optional<GradScalerState>& state) {
  if (!options_.enabled) return;
  if (!state) {
    throw std::invalid_argument(
        "GradScaler::load_state_dict: the state is empty, because the scaler "
        "that saved it was disabled. Give the state of an enabled scaler, or "
        "begin without a state.");
  }
  options_.init_scale = state->scale;
  options_.growth_factor = state->growth_factor;
  options_.backoff_factor = state->backoff_factor;
  options_.growth_interval = state->growth_interval;
  init_growth_tracker_ = state->growth_tracker;
  if (scale_.defined()) {
    scale_.fill_(state->scale);
    growth_tracker_.fill_(state->growth_tracker);
  }
  optimizers_.clear();
}

StateTree to_state_tree(const GradScalerState& state) {
  StateTree::Dict dict;
  dict.set(kScale, state.scale);
  dict.set(kGrowthFactor, state.growth_factor);
  dict.set(kBackoffFactor, state.backoff_factor);
  dict.set(kGrowthInterval, state.growth_interval);
  dict.set(kGrowthTracker, state.growth_tracker);
  return dict;
}

void from_state_tree(const StateTree& tree, GradScalerState& state) {
  const auto* dict = tree.as<StateTree::Dict>();
  if (!dict) refuse("is not a dict");
  GradScalerState all;
  const auto read = [&](const char* name, auto& to) {
    using Number = std::remove_reference_t<decltype(to)>;
    const StateTree* found = dict->find(name);
    if (!found) refuse(std::string("has no \"") + name + '"');
    if (const auto* number = found->as<Number>()) {
      to = *number;
    } else {
      refuse(std::string("has a \"") + name + "\" of another type");
    }
  };
  read(kScale, all.scale);
  read(kGrowthFactor, all.growth_factor);
  read(kBackoffFactor, all.backoff_factor);
  read(kGrowthInterval, all.growth_interval);
  read(kGrowthTracker, all.growth_tracker);
  state = all;
}

std::string to_json(const GradScalerState& state) {
  Json object = {
      {kScale, finite(kScale, state.scale)},
      {kGrowthFactor, finite(kGrowthFactor, state.growth_factor)},
      {kBackoffFactor, finite(kBackoffFactor, state.backoff_factor)},
      {kGrowthInterval, state.growth_interval},
      {kGrowthTracker, state.growth_tracker},
  };
  return object.dump();
}

GradScalerState grad_scaler_state_from_json(std::string_view text) {
  Json object = Json::parse(text.begin(), text.end(), /*cb=*/nullptr,
                            /*allow_exceptions=*/false);
  if (!object.is_object()) refuse("is not a JSON object");
  return {.scale = number(object, kScale),
          .growth_factor = number(object, kGrowthFactor),
          .backoff_factor = number(object, kBackoffFactor),
          .growth_interval = integer(object, kGrowthInterval),
          .growth_tracker = integer(object, kGrowthTracker)};
}

}  // namespace lockstep
