#include "lockstep/checkpoint/optimizer_state.h"

#include <ATen/ATen.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <typeinfo>
#include <unordered_map>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/optimizer_fields.h"
#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/comm/distinct_tensors.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/state/optimizer_group.h"

namespace lockstep {
namespace {

using Values = std::map<std::string, StateValue>;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// Python's optimizers count steps in float32, which is exact up to this number.
constexpr int64_t kExactInFloat = int64_t{1} << 24;

struct Capture {
  bool maximize = false;
  Values values{};

  void field(const char* name, double value) { values[name] = value; }
  void field(const char* name, bool value) { values[name] = value; }
  void field(const char* name, const std::tuple<double, double>& value) {
    values[name] = std::vector<double>{std::get<0>(value), std::get<1>(value)};
  }
  void step(const char* name, int64_t value) {
    values[name] = at::scalar_tensor(
        value, value > kExactInFloat ? at::kDouble : at::kFloat);
  }
  void buffer(const char* name, const at::Tensor& value, bool) {
    if (value.defined()) values[name] = value.detach();
  }
  void fixed(const char* name, bool value) { values[name] = value; }
  void ignored(const char* name) { values[name] = std::monostate(); }
  void ignored(const char* name, bool value) { values[name] = value; }
};

[[noreturn]] void refuse(const std::string& kind, const std::string& why) {
  throw std::invalid_argument(
      "the snapshot's optimizer state does not fit this " + kind + ": " + why +
      "; build the optimizer that was saved, or start without its state");
}

// Returns the value of a Python number: int, float, bool, or a tensor of one
// element.
double number(const StateValue& value, const std::string& kind,
              const std::string& name) {
  if (const auto* real = std::get_if<double>(&value)) return *real;
  if (const auto* whole = std::get_if<int64_t>(&value)) {
    return static_cast<double>(*whole);
  }
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? 1 : 0;
  const auto* tensor = std::get_if<at::Tensor>(&value);
  if (tensor && tensor->numel() == 1 && !tensor->is_complex()) {
    return tensor->item<double>();
  }
  refuse(kind, name + " is not a number");
}

// Options of Python that choose an implementation, and change no result.
constexpr std::array<std::string_view, 3> kImplementationOptions{
    "foreach", "fused", "capturable"};

struct RestoreOptions {
  const Values& values;
  std::string kind;
  bool maximize;
  std::set<std::string> known{kImplementationOptions.begin(),
                              kImplementationOptions.end()};

  const StateValue& need(const char* name) {
    known.insert(name);
    const auto found = values.find(name);
    if (found == values.end()) {
      refuse(kind, std::string(name) +
                       " is missing, or is not a number or list of numbers");
    }
    return found->second;
  }
  void field(const char* name, double& value) {
    value = number(need(name), kind, name);
  }
  void field(const char* name, bool& value) {
    value = number(need(name), kind, name) != 0;
  }
  void field(const char* name, std::tuple<double, double>& value) {
    const auto* list = std::get_if<std::vector<double>>(&need(name));
    if (!list || list->size() != 2) {
      refuse(kind, std::string(name) + " is not a pair of numbers");
    }
    value = {list->front(), list->back()};
  }
  void fixed(const char* name, bool value) {
    known.insert(name);
    const auto found = values.find(name);
    if (found == values.end() ||
        std::holds_alternative<std::monostate>(found->second)) {
      return;  // written by a release that had no such option
    }
    if ((number(found->second, kind, name) != 0) == value) return;
    std::string why = std::string("it was saved with ") + name + "=" +
                      (value ? "False" : "True");
    if (std::string_view(name) == "maximize") {
      why +=
          ", which is a member of lockstep::optim::SGDOptions, AdamOptions and "
          "AdamWOptions";
    }
    refuse(kind, why);
  }
  void ignored(const char*) {}
  void ignored(const char*, bool) {}
  void check_surplus() const {
    for (const auto& [name, value] : values) {
      if (known.contains(name) || internal::is_scheduler_value(name) ||
          std::holds_alternative<std::monostate>(value)) {
        continue;
      }
      refuse(kind,
             "it was saved with the option " + name +
                 ", which this kind of optimizer does not have; if it "
                 "changes no step, load the snapshot as a Snapshot, erase "
                 "it from the options of the groups, and save that");
    }
  }
};

struct RestoreState {
  const Values& values;
  std::string kind;
  const at::Tensor& param;
  std::string where;  // "parameter 3"
  bool adopt;
  std::set<std::string> known{};

  void step(const char* name, int64_t& value) {
    known.insert(name);
    const auto found = values.find(name);
    if (found == values.end()) refuse(kind, where + " has no " + name);
    const double steps = number(found->second, kind, where + "'s " + name);
    // Above 2^53 a double is not an exact count, and a cast may overflow.
    if (!(steps >= 0 && steps <= 9007199254740992.0)) {
      refuse(kind, where + " has " + name + " " + std::to_string(steps));
    }
    value = static_cast<int64_t>(steps);
  }
  void buffer(const char* name, at::Tensor& value, bool needed) {
    known.insert(name);
    const auto found = values.find(name);
    const at::Tensor* tensor = found == values.end()
                                   ? nullptr
                                   : std::get_if<at::Tensor>(&found->second);
    if (!tensor) {
      if (needed) refuse(kind, where + " has no " + name);
      return;
    }
    at::Tensor saved = *tensor;
    const auto* layout = internal::layout_of(param);
    if (layout && saved.sizes() == at::IntArrayRef(layout->shape)) {
      saved = internal::part_of(saved, *layout);
    }
    if (saved.sizes() != param.sizes()) {
      std::ostringstream text;
      text << where << " has " << name << " of shape " << saved.sizes()
           << ", the parameter has " << param.sizes();
      refuse(kind, text.str());
    }
    // As in Python, the state has its parameter's dtype and device.
    value = at::empty_like(param.detach(), at::MemoryFormat::Preserve);
    if (adopt && saved.scalar_type() == value.scalar_type() &&
        saved.device() == value.device() &&
        saved.strides() == value.strides()) {
      value = saved;
    } else {
      value.copy_(saved);
    }
  }
  void check_surplus() const {
    for (const auto& [name, value] : values) {
      if (!known.contains(name) &&
          !std::holds_alternative<std::monostate>(value)) {
        refuse(kind, where + " has " + name +
                         ", which this kind of optimizer does not have");
      }
    }
  }
};

// One kind of optimizer; the functions differ by kind.
struct Kind {
  const char* name;
  bool (*fits)(const Optimizer&);
  Values (*capture_options)(OptimizerOptions&, bool maximize);
  Values (*capture_state)(OptimizerParamState&, OptimizerOptions&);
  std::unique_ptr<OptimizerOptions> (*options)(const Values&, bool maximize);
  // Returns nullptr if the saved state is empty.
  std::unique_ptr<OptimizerParamState> (*state)(const Values&,
                                                const OptimizerOptions&,
                                                const at::Tensor& param,
                                                const std::string& where,
                                                bool adopt);
};

template <class Fields>
Kind kind() {
  using Options = typename Fields::Options;
  using State = typename Fields::State;
  Kind result{};
  result.name = Fields::kName;
  result.fits = [](const Optimizer& optimizer) {
    return dynamic_cast<const typename Fields::Optimizer*>(&optimizer) !=
           nullptr;
  };
  result.capture_options = [](OptimizerOptions& options, bool maximize) {
    Capture capture{.maximize = maximize};
    Fields::visit_options(static_cast<Options&>(options), capture);
    return capture.values;
  };
  result.capture_state = [](OptimizerParamState& state,
                            OptimizerOptions& options) {
    Capture capture;
    Fields::visit_state(static_cast<State&>(state),
                        static_cast<Options&>(options), capture);
    return capture.values;
  };
  result.options = [](const Values& values,
                      bool maximize) -> std::unique_ptr<OptimizerOptions> {
    auto options = std::make_unique<Options>(Fields::options());
    RestoreOptions restore{values, Fields::kName, maximize};
    Fields::visit_options(*options, restore);
    restore.check_surplus();
    return options;
  };
  result.state = [](const Values& values, const OptimizerOptions& options,
                    const at::Tensor& param, const std::string& where,
                    bool adopt) -> std::unique_ptr<OptimizerParamState> {
    bool any = false;
    for (const auto& [name, value] : values) {
      any = any || !std::holds_alternative<std::monostate>(value);
    }
    if (!any) return nullptr;
    auto state = std::make_unique<State>();
    RestoreState restore{values, Fields::kName, param, where, adopt};
    Fields::visit_state(*state, static_cast<const Options&>(options), restore);
    restore.check_surplus();
    return state;
  };
  return result;
}

const Kind& kind_of(const Optimizer& optimizer) {
  static const Kind kinds[] = {
      kind<internal::SgdFields>(), kind<internal::AdamFields>(),
      kind<internal::AdamWFields>(), kind<internal::RmspropFields>(),
      kind<internal::AdagradFields>()};
  for (const Kind& candidate : kinds) {
    if (candidate.fits(optimizer)) return candidate;
  }
  throw std::invalid_argument(
      "an optimizer of type " + c10::demangle(typeid(optimizer).name()) +
      " cannot be saved in a snapshot; SGD, Adam, AdamW, RMSprop and Adagrad "
      "can");
}

bool maximizes(const Optimizer& optimizer) {
  const auto* option =
      dynamic_cast<const internal::MaximizeOption*>(&optimizer);
  return option != nullptr && option->maximize();
}

const internal::OptimizerWrapper* wrapper_of(const Optimizer& optimizer) {
  return dynamic_cast<const internal::OptimizerWrapper*>(&optimizer);
}

// Returns the optimizer that has the state: what a wrapper steps, or itself.
const Optimizer& stepped_by(const Optimizer& optimizer) {
  const auto* wrapper = wrapper_of(optimizer);
  return wrapper ? wrapper->wrapped() : optimizer;
}

// The parameters of a group, in the order of their numbers.
using Parameters = std::vector<at::Tensor>;
std::vector<Parameters> groups_of(const Optimizer& optimizer) {
  std::vector<Parameters> groups;
  for (const auto& group : stepped_by(optimizer).param_groups()) {
    groups.push_back(distinct(group.params()));
  }
  return groups;
}

// The names in a state, and which parameters of a module they stand for.
class NamesInState {
 public:
  // Throws std::invalid_argument if a group of the state has not one name for
  // each parameter.
  NamesInState(const internal::ParameterNames& names,
               const OptimizerState& state)
      : names_(names) {
    bool wrapped = true;
    for (const auto& group : state.param_groups) {
      if (group.param_names.size() != group.params.size()) {
        throw std::invalid_argument(
            "a group of the optimizer state has " +
            std::to_string(group.params.size()) + " parameters and " +
            std::to_string(group.param_names.size()) + " names");
      }
      for (const std::string& name : group.param_names) {
        wrapped = wrapped && name.starts_with(internal::kWrapperPrefix);
      }
    }
    for (const auto& [name, first] : names_.known()) {
      wrapped = wrapped && !name.starts_with(internal::kWrapperPrefix);
    }
    if (wrapped) prefix_ = internal::kWrapperPrefix;
  }

  // Returns the first name of the parameter that a name in the state stands
  // for; that name itself if the module has no such parameter.
  std::string own(const std::string& name) const {
    const std::string bare = name.substr(prefix_.size());
    const auto found = names_.known().find(bare);
    return found == names_.known().end() ? bare : found->second;
  }

 private:
  const internal::ParameterNames& names_;
  std::string_view prefix_;
};

// Throws std::invalid_argument if `saved`, of which `load` was made, has the
// parameters in another order than `module`.
void require_same_order(const NamedTensors& saved,
                        const internal::ModuleLoad& load,
                        const torch::nn::Module& module) {
  std::unordered_map<const c10::TensorImpl*, size_t> place;
  for (size_t i = 0; i < saved.size(); ++i) {
    place.emplace(saved[i].second.unsafeGetTensorImpl(), i);
  }
  const auto names = internal::parameter_names(module);
  std::set<size_t> seen;  // the second name of a tied weight has its place
  for (const auto& [from, to] : load.copies) {
    const auto name = names.find(to.unsafeGetTensorImpl());
    const size_t at = place.at(from.unsafeGetTensorImpl());
    if (name == names.end() || to.numel() == 0 || seen.contains(at)) continue;
    if (!seen.empty() && at < *seen.rbegin()) {
      throw std::invalid_argument(
          "the snapshot's optimizer state has numbers instead of the "
          "parameters' names, and the model has its parameters in another "
          "order than the snapshot: " +
          name->second + " was before " + saved[*seen.rbegin()].first +
          "; register them in the snapshot's order, or start without its "
          "optimizer state");
    }
    seen.insert(at);
  }
}

}  // namespace

OptimizerState state_dict(const Optimizer& given) {
  const Optimizer& optimizer = stepped_by(given);
  const Kind& kind = kind_of(optimizer);
  OptimizerState captured;
  if (const auto* wrapper = wrapper_of(given)) {
    captured.averager_step = wrapper->averager_step();
  }
  int64_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    // The options are cloned, because the fields are visited through references
    // that could write.
    const auto options = group.options().clone();
    OptimizerState::Group& written = captured.param_groups.emplace_back();
    written.options = kind.capture_options(*options, maximizes(optimizer));
    for (const at::Tensor& param : distinct(group.params())) {
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) {
        captured.state[index] = kind.capture_state(*found->second, *options);
      }
      written.params.push_back(index++);
    }
  }
  return captured;
}

OptimizerState state_dict(const Optimizer& optimizer,
                          const torch::nn::Module& module) {
  return internal::named_state_dict(optimizer,
                                    internal::ParameterNames(module));
}

namespace internal {

ParameterNames::ParameterNames(const torch::nn::Module& module)
    : first_(parameter_names(module)) {
  for (const auto& [name, tensor, is_parameter] : tensors_of(module)) {
    if (is_parameter) known_[name] = first_.at(tensor.unsafeGetTensorImpl());
  }
}

std::string ParameterNames::of(const at::Tensor& parameter) const {
  const auto found = first_.find(parameter.unsafeGetTensorImpl());
  return found == first_.end() ? "" : found->second;
}

OptimizerState named_state_dict(const Optimizer& optimizer,
                                const ParameterNames& names) {
  OptimizerState captured = state_dict(optimizer);
  auto group = captured.param_groups.begin();
  for (const Parameters& own : groups_of(optimizer)) {
    for (const at::Tensor& param : own) {
      group->param_names.push_back(names.of(param));
    }
    ++group;
  }
  return captured;
}

bool has_names(const OptimizerState& state) {
  return std::ranges::any_of(state.param_groups, [](const auto& group) {
    return !group.param_names.empty();
  });
}

OptimizerState in_order_of(const Optimizer& optimizer,
                           const OptimizerState& state,
                           const ParameterNames& names) {
  const std::string kind = kind_of(stepped_by(optimizer)).name;
  const std::vector<Parameters> groups = groups_of(optimizer);
  const NamesInState in_state(names, state);
  OptimizerState result = state;
  for (size_t g = 0; g < std::min(groups.size(), result.param_groups.size());
       ++g) {
    OptimizerState::Group& group = result.param_groups[g];
    // Those without a name keep their order.
    std::multimap<std::string, int64_t> saved;
    for (size_t p = 0; p < group.params.size(); ++p) {
      saved.emplace(in_state.own(group.param_names[p]), group.params[p]);
    }
    group.params.clear();
    group.param_names.clear();
    const auto spoken = [](const std::string& name) {
      return name.empty() ? "a parameter that is not the model's" : name;
    };
    const std::string where = "its group " + std::to_string(g);
    for (const at::Tensor& param : groups[g]) {
      const std::string name = names.of(param);
      const auto found = saved.lower_bound(name);
      if (found == saved.end() || found->first != name) {
        refuse(kind, where + " lacks " + spoken(name));
      }
      group.params.push_back(found->second);
      group.param_names.push_back(name);
      saved.erase(found);
    }
    if (!saved.empty()) {
      refuse(kind, where + " has " + spoken(saved.begin()->first) +
                       ", the optimizer's does not");
    }
  }
  return result;
}

void require_names(const OptimizerState& state) {
  if (has_names(state) || state.state.empty()) return;
  throw std::invalid_argument(
      "the optimizer state has numbers instead of the parameters' names; if "
      "the optimizer has its parameters in the same order, load it without "
      "the module");
}

OptimizerState ordered_state(const Snapshot& snapshot, const ModuleLoad& load,
                             const Optimizer& optimizer,
                             const torch::nn::Module& module) {
  if (!snapshot.optimizer_state->unreadable.empty()) {
    return *snapshot.optimizer_state;  // OptimizerLoad says why it is refused
  }
  if (has_names(*snapshot.optimizer_state)) {
    return in_order_of(optimizer, *snapshot.optimizer_state,
                       ParameterNames(module));
  }
  require_same_order(snapshot.model_state, load, module);
  return *snapshot.optimizer_state;
}

void require_state_dict(const Optimizer& optimizer) {
  kind_of(stepped_by(optimizer));
}

struct OptimizerLoad::Prepared {
  std::vector<std::unique_ptr<OptimizerOptions>> options;
  std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>> state;
};

OptimizerLoad::OptimizerLoad(Optimizer& optimizer, const OptimizerState& state,
                             bool adopt)
    : wrapper_(dynamic_cast<OptimizerWrapper*>(&optimizer)),
      optimizer_(wrapper_ ? wrapper_->wrapped() : optimizer),
      averager_step_(state.averager_step),
      prepared_(std::make_unique<Prepared>()) {
  const at::NoGradGuard no_grad;
  const Kind& kind = kind_of(optimizer_);
  if (!state.unreadable.empty()) refuse(kind.name, state.unreadable);
  auto& groups = optimizer_.param_groups();
  if (groups.size() != state.param_groups.size()) {
    refuse(kind.name, "it has " + std::to_string(state.param_groups.size()) +
                          " parameter groups, the optimizer has " +
                          std::to_string(groups.size()));
  }
  std::set<int64_t> used;
  for (size_t g = 0; g < groups.size(); ++g) {
    const OptimizerState::Group& saved = state.param_groups[g];
    const auto params = distinct(groups[g].params());
    if (params.size() != saved.params.size()) {
      refuse(kind.name, "its group " + std::to_string(g) + " has " +
                            std::to_string(saved.params.size()) +
                            " parameters, the optimizer's has " +
                            std::to_string(params.size()));
    }
    if (!saved.unreadable.empty()) refuse(kind.name, saved.unreadable);
    prepared_->options.push_back(
        kind.options(saved.options, maximizes(optimizer_)));
    for (size_t p = 0; p < params.size(); ++p) {
      const auto found = state.state.find(saved.params[p]);
      if (found == state.state.end()) continue;
      used.insert(found->first);
      const std::string name =
          p < saved.param_names.size() ? saved.param_names[p] : "";
      auto restored = kind.state(
          found->second, *prepared_->options.back(), params[p],
          "parameter " + (name.empty() ? std::to_string(found->first) : name),
          adopt);
      if (restored) {
        prepared_->state.emplace_back(params[p].unsafeGetTensorImpl(),
                                      std::move(restored));
      }
    }
  }
  if (used.size() != state.state.size()) {
    refuse(kind.name, "it has state for parameters that are in no group");
  }
}

OptimizerLoad::~OptimizerLoad() = default;

void OptimizerLoad::apply() {
  auto& groups = optimizer_.param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].set_options(std::move(prepared_->options[g]));
  }
  optimizer_.state().clear();
  for (auto& [param, state] : prepared_->state) {
    optimizer_.state()[param] = std::move(state);
  }
  if (wrapper_) wrapper_->take_loaded(averager_step_);
}

}  // namespace internal

void load_state_dict(Optimizer& optimizer, const OptimizerState& state) {
  internal::OptimizerLoad(optimizer, state).apply();
}

IncompatibleKeys load_state_dict(Optimizer& optimizer,
                                 const OptimizerState& state,
                                 const torch::nn::Module& module,
                                 const LoadOptimizerOptions& options) {
  internal::require_names(state);
  const internal::ParameterNames names(module);
  if (options.strict) {
    load_state_dict(optimizer, internal::in_order_of(optimizer, state, names));
    return {};
  }
  const NamesInState in_state(names, state);
  std::map<std::string, int64_t> saved;  // number, by name
  IncompatibleKeys left;
  for (const OptimizerState::Group& group : state.param_groups) {
    for (size_t p = 0; p < group.params.size(); ++p) {
      saved[in_state.own(group.param_names[p])] = group.params[p];
    }
  }
  saved.erase("");
  OptimizerState merged = internal::named_state_dict(optimizer, names);
  merged.unreadable = state.unreadable;
  for (const OptimizerState::Group& group : merged.param_groups) {
    for (size_t p = 0; p < group.params.size(); ++p) {
      const auto found = saved.find(group.param_names[p]);
      if (found == saved.end()) {
        if (!group.param_names[p].empty()) {
          left.missing_keys.push_back(group.param_names[p]);
        }
        continue;
      }
      merged.state.erase(group.params[p]);
      const auto values = state.state.find(found->second);
      if (values != state.state.end()) {
        merged.state.emplace(group.params[p], values->second);
      }
      saved.erase(found);
    }
  }
  for (const auto& [name, number] : saved) left.unexpected_keys.push_back(name);
  load_state_dict(optimizer, merged);
  return left;
}

}  // namespace lockstep
