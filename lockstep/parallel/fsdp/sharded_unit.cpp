#include "lockstep/parallel/fsdp/sharded_unit.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <utility>

#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/own_device.h"
#include "lockstep/comm/tensor_layout.h"
#include "lockstep/parallel/fsdp/flat_parameters.h"
#include "lockstep/parallel/fsdp/sharding_root.h"
#include "lockstep/parallel/fsdp/unit_hooks.h"
#include "lockstep/parallel/module/module_contents.h"
#include "lockstep/worker/healing_place.h"

namespace lockstep::internal {
namespace {

std::invalid_argument unit_mistake(const std::string& what) {
  return std::invalid_argument("FullyShard: " + what);
}

FullyShardOptions checked_options(FullyShardOptions options) {
  options.group = group_or_default(options.group);
  const auto& policy = options.mp_policy;
  for (const auto& [name, dtype] :
       {std::pair{"param_dtype", policy.param_dtype},
        {"reduce_dtype", policy.reduce_dtype},
        {"output_dtype", policy.output_dtype}}) {
    if (!dtype || at::isFloatingType(*dtype)) continue;
    throw unit_mistake(c10::str("mp_policy.", name, " is ", *dtype,
                                "; give a floating-point dtype"));
  }
  const auto& replicas = options.replicate_group.require_member();
  if (!replicas) return options;
  const auto in_both = [&](int rank) {
    return std::ranges::find(replicas->global_ranks(), rank) !=
           replicas->global_ranks().end();
  };
  if (std::ranges::count_if(options.group->global_ranks(), in_both) != 1) {
    throw unit_mistake(
        "group and replicate_group must have exactly this rank in common, like "
        "a row and a column of a table of ranks");
  }
  return options;
}

// Throws if the ranks of `group` cannot be divided so.
void require_divisor(ReshardAfterForward reshard_after_forward,
                     const ProcessGroupPtr& group) {
  const int64_t size = group->size();
  const int64_t ranks = reshard_after_forward.ranks().value_or(size);
  if (ranks >= 1 && (size % ranks == 0 || size == 1)) return;
  throw unit_mistake(c10::str("reshard_after_forward is ", ranks,
                              "; give true, false, or a number of ranks that "
                              "divides the group's size, ",
                              size));
}

// A process that takes a place makes its groups before its first forward, and
// all ranks must have made the same groups.
void make_neighbours_to_heal(ShardingRoot& root, const ShardedUnit& unit) {
  if (job_heals()) root.make_neighbours(unit.ranks_after_forward());
}

// The parts of the parameters that one FlatParameters has: all of one kind.
using UnitKind = std::tuple<at::ScalarType, c10::DeviceType, bool>;

bool is_divided_over_groups(const at::Tensor& tensor,
                            const FullyShardOptions& options) {
  return is_divided_over(tensor, *options.group) ||
         (options.replicate_group &&
          is_divided_over(tensor, *options.replicate_group));
}

// Returns the buffers of which all ranks have the same.
std::vector<std::pair<std::string, at::Tensor>> common_buffers(
    const torch::nn::Module& module, const FullyShardOptions& options) {
  std::vector<std::pair<std::string, at::Tensor>> common;
  for (const auto& buffer : module.named_buffers()) {
    const auto& tensor = buffer.value();
    if (!tensor.defined() || is_divided_over_groups(tensor, options)) continue;
    common.emplace_back(buffer.key(), tensor);
  }
  return common;
}

// `values`: whether they are compared, too.
std::string description_of(const at::Tensor& tensor, bool values) {
  auto text = c10::str(tensor.scalar_type(), " ", tensor.sizes());
  if (!values || tensor.layout() != at::kStrided) return text;
  const auto bytes = tensor.detach().cpu().contiguous();
  return c10::str(
      text, ", values with the hash ",
      std::hash<std::string_view>()(
          {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()}));
}

// The options that all ranks must have alike, by name.
std::vector<std::pair<std::string, std::string>> compared_options(
    const FullyShardOptions& options) {
  const auto dtype = [](const std::optional<at::ScalarType>& one) {
    return one ? c10::str(*one) : std::string("not set");
  };
  const auto flag = [](bool one) { return one ? "true" : "false"; };
  const auto& policy = options.mp_policy;
  const auto reshards = [&]() -> std::string {
    if (!options.reshard_after_forward) return "not set";
    const auto ranks = options.reshard_after_forward->ranks();
    return !ranks ? "true" : *ranks == 1 ? "false" : std::to_string(*ranks);
  };
  return {{"replicate_group", options.replicate_group ? "set" : "not set"},
          {"reshard_after_forward", reshards()},
          {"shared_memory", flag(options.shared_memory)},
          {"mp_policy.param_dtype", dtype(policy.param_dtype)},
          {"mp_policy.reduce_dtype", dtype(policy.reduce_dtype)},
          {"mp_policy.output_dtype", dtype(policy.output_dtype)},
          {"mp_policy.cast_forward_inputs", flag(policy.cast_forward_inputs)},
          {"init_sync", flag(options.init_sync)}};
}

// Throws on all ranks if they have different parameters, buffers or options, or
// different parts of a parameter.
void require_same_on_ranks(const torch::nn::Module& module,
                           const std::vector<FoundParameter>& parameters,
                           const FullyShardOptions& options) {
  const bool values = !options.init_sync;
  auto held = compared_options(options);
  for (auto& [name, value] : held) name = "option " + name;
  for (const auto& [name, tensor, places] : parameters) {
    // Parts may have different shapes; their error comes below.
    const bool divided = is_divided_over_groups(tensor, options);
    held.emplace_back("parameter " + name,
                      (divided ? "divided" : description_of(tensor, values)) +
                          words_of_other_device(tensor, *options.group) +
                          (tensor.requires_grad() ? "" : ", frozen"));
  }
  for (const auto& [name, tensor] : common_buffers(module, options)) {
    held.emplace_back("buffer " + name,
                      description_of(tensor, values) +
                          words_of_other_device(tensor, *options.group));
  }
  const auto compare = [&held](const ProcessGroupPtr& group) {
    Agreement agreement(group);
    for (const auto& [name, text] : held) agreement.hold(name, text);
    return agreement.compare();
  };
  auto found = compare(options.group);
  // Also if this rank knows already: its replicas wait for it.
  if (options.replicate_group) {
    const auto other = compare(options.replicate_group);
    if (!found) found = other;
  }
  if (found) {
    throw unit_mistake(
        found->words() +
        (found->name.starts_with("option ")
             ? "; give the same options on every rank"
             : "; construct the same module on every rank, with equal values "
               "unless init_sync is set (set_placement() tells of buffers that "
               "may differ)"));
  }
  for (const auto& group : {options.group, options.replicate_group}) {
    for (const auto& [name, tensor, places] : parameters) {
      if (!group) continue;
      require_replica(tensor, *group, "FullyShard",
                      "give group, and replicate_group, ranks that have the "
                      "same part",
                      name);
    }
  }
}

void broadcast_first_values(const torch::nn::Module& module,
                            const std::vector<FoundParameter>& parameters,
                            const FullyShardOptions& options) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters) tensors.push_back(parameter.tensor);
  for (const auto& [name, tensor] : common_buffers(module, options)) {
    tensors.push_back(tensor);
  }
  for (const auto& group : {options.group, options.replicate_group}) {
    if (!group || group->size() == 1) continue;
    for (const auto& tensor : tensors) {
      broadcast(tensor, group->global_rank(0), {.group = group});
    }
  }
}

}  // namespace

std::shared_ptr<ShardedUnit> ShardedUnit::make(torch::nn::Module& module,
                                               FullyShardOptions options) {
  std::shared_ptr<ShardedUnit> unit(
      new ShardedUnit(checked_options(std::move(options))));
  unit->find(module);
  return unit;
}

ShardedUnit::ShardedUnit(FullyShardOptions options)
    : options_(std::move(options)),
      reshard_after_forward_(options_.reshard_after_forward) {}

ShardedUnit::~ShardedUnit() = default;

void ShardedUnit::find(torch::nn::Module& module) {
  std::vector<FoundParameter> found;
  std::vector<std::shared_ptr<ShardedUnit>> nested;
  const auto find_one = [&](torch::nn::Module& part, const std::string& name,
                            const std::string& key, const at::Tensor& tensor) {
    if (const auto other = unit_of(tensor)) {
      if (std::ranges::find(other->modules_, &module) !=
          other->modules_.end()) {
        throw unit_mistake(c10::str(
            "parameter ", name,
            " is in a unit already, because this module, or one that contains "
            "it, was sharded before; a copy of a FullyShard is the same unit"));
      }
      for (const auto& flat : other->flats()) {
        for (const auto& parameter : flat->parameters()) {
          if (parameter.shard.is_same(tensor)) {
            other->path_ = name.substr(
                0,
                name.size() - std::min(name.size(), parameter.name.size() + 1));
          }
          if (!parameter.compute.is_same(tensor)) continue;
          throw unit_mistake(c10::str(
              "parameter ", name, " is tied to parameter ", parameter.name,
              " of another unit; put both into one unit, by sharding only the "
              "module that contains both"));
        }
      }
      if (std::ranges::find(nested, other) == nested.end()) {
        nested.push_back(other);
      }
      return;
    }
    if (dynamic_cast<torch::nn::ParameterListImpl*>(&part) != nullptr ||
        dynamic_cast<torch::nn::ParameterDictImpl*>(&part) != nullptr) {
      throw unit_mistake(c10::str(
          "parameter ", name,
          " is in a ParameterList or ParameterDict, which would give its users "
          "the shard; register it with register_parameter() and keep the "
          "tensor in a member"));
    }
    const auto* layout = layout_of(tensor);
    if (layout != nullptr && layout->range) {
      throw unit_mistake(
          c10::str("parameter ", name, " is already divided into shards"));
    }
    if (tensor.is_complex() || tensor.layout() != at::kStrided) {
      throw unit_mistake(c10::str("parameter ", name, " is a ",
                                  tensor.toString(),
                                  "; give dense tensors of real numbers"));
    }
    const auto known = std::ranges::find_if(
        found, [&](const auto& one) { return one.tensor.is_same(tensor); });
    if (known == found.end()) {
      found.push_back({name, tensor, {{&part, key}}});
    } else {
      known->places.push_back({&part, key});
    }
  };
  for (const auto& part : module.named_modules()) {
    for (const auto& parameter :
         part.value()->named_parameters(/*recurse=*/false)) {
      const auto name = part.key().empty() ? parameter.key()
                                           : part.key() + "." + parameter.key();
      find_one(*part.value(), name, parameter.key(), parameter.value());
    }
  }
  for (const auto& part : module.modules()) modules_.push_back(part.get());
  require_same_on_ranks(module, found, options_);
  // Not earlier: ranks with other options wait for this one.
  if (reshard_after_forward_) {
    require_divisor(*reshard_after_forward_, options_.group);
  }
  if (options_.init_sync) broadcast_first_values(module, found, options_);

  adopt(nested);
  std::vector<std::pair<UnitKind, std::vector<FoundParameter>>> kinds;
  for (auto& parameter : found) {
    const auto& tensor = parameter.tensor;
    const UnitKind kind{tensor.scalar_type(), tensor.device().type(),
                        tensor.requires_grad()};
    auto same = std::ranges::find(
        kinds, kind, &std::pair<UnitKind, std::vector<FoundParameter>>::first);
    if (same == kinds.end()) same = kinds.insert(same, {kind, {}});
    same->second.push_back(std::move(parameter));
  }
  found.clear();
  for (auto& [kind, parameters] : kinds) {
    flats_.push_back(std::make_unique<FlatParameters>(
        std::move(parameters), options_, weak_from_this()));
    for (const auto& parameter : flats_.back()->parameters()) {
      watch_gradient(parameter.compute, weak_from_this());
    }
  }
  module_ = module.weak_from_this();
  registered_ = registered_parameters(module);
  const bool shares = std::ranges::any_of(
      flats_, [](const auto& flat) { return flat->in_common(); });
  // After this every rank has written its part of the first values.
  if (shares && options_.group->size() > 1) barrier({.group = options_.group});
}

void ShardedUnit::adopt(
    const std::vector<std::shared_ptr<ShardedUnit>>& nested) {
  root_ =
      std::make_shared<ShardingRoot>(options_.group, options_.replicate_group);
  std::vector<std::shared_ptr<ShardingRoot>> roots;
  for (const auto& unit : nested) {
    if (unit->options_.group != options_.group ||
        unit->options_.replicate_group != options_.replicate_group) {
      throw unit_mistake(
          "this unit contains one with another group or replicate_group; give "
          "all units of a model the same groups");
    }
    if (std::ranges::find(roots, unit->root_) == roots.end()) {
      roots.push_back(unit->root_);
    }
  }
  for (const auto& root : roots) {
    root_->take_neighbours(*root);
    for (const auto& unit : root->units()) {
      unit->root_ = root_;
      root_->add(unit);
      nested_.push_back(unit);
    }
  }
  root_->add(shared_from_this());
  if (reshard_after_forward_) make_neighbours_to_heal(*root_, *this);
}

std::string ShardedUnit::name() const {
  return path_.empty() ? "the outermost unit" : "unit " + path_;
}

bool ShardedUnit::is_outermost() const { return root_->is_last(*this); }

const std::string* ShardedUnit::with_gradient() const {
  for (const auto& flat : flats_) {
    if (const auto* found = flat->with_gradient()) return &found->name;
  }
  return nullptr;
}

int ShardedUnit::ranks_after_forward() const {
  const auto ranks = reshard_after_forward_.value_or(!is_outermost()).ranks();
  return static_cast<int>(ranks.value_or(options_.group->size()));
}

void ShardedUnit::set_reshard_after_forward(
    ReshardAfterForward reshard_after_forward, bool recurse) {
  require_divisor(reshard_after_forward, options_.group);
  reshard_after_forward_ = reshard_after_forward;
  make_neighbours_to_heal(*root_, *this);
  if (!recurse) return;
  for (const auto& nested : nested_) {
    if (const auto unit = nested.lock()) {
      unit->reshard_after_forward_ = reshard_after_forward;
    }
  }
}

bool ShardedUnit::set_requires_gradient_sync(bool requires_gradient_sync) {
  return std::exchange(root_->requires_gradient_sync, requires_gradient_sync);
}

void ShardedUnit::start_unshard() { root_->start_unshard(*this); }
void ShardedUnit::wait_unshard() { root_->wait_unshard(*this); }
void ShardedUnit::reshard() { root_->reshard(*this); }

void ShardedUnit::zero_kept_gradients(bool set_to_none) {
  if (!root_->keeps_gradients()) return;
  for (const auto& flat : flats_) flat->zero_gradients(set_to_none);
  for (const auto& nested : nested_) {
    const auto unit = nested.lock();
    if (!unit) continue;
    for (const auto& flat : unit->flats_) flat->zero_gradients(set_to_none);
  }
}

void ShardedUnit::require_same_parameters() const {
  const auto module = module_.lock();
  if (!module) return;
  require_registered(*module, registered_, "FullyShard",
                     "would be neither divided nor averaged");
}

// The call owns this unit.
void ShardedUnit::before_backward(UnitCall& call) {
  root_->before_backward(call);
}

void ShardedUnit::after_backward(UnitCall& call) {
  root_->after_backward(call);
}

void ShardedUnit::gradient_came() { root_->gradient_came(); }

std::shared_ptr<UnitCall> ShardedUnit::make_call(int64_t forward) {
  std::erase_if(calls_, [](const auto& call) { return call.expired(); });
  auto call = std::make_shared<UnitCall>(
      UnitCall{.unit = shared_from_this(), .forward = forward});
  calls_.push_back(call);
  return call;
}

std::vector<std::shared_ptr<UnitCall>> ShardedUnit::live_calls() {
  std::vector<std::shared_ptr<UnitCall>> live;
  for (const auto& call : calls_) {
    if (auto locked = call.lock()) live.push_back(std::move(locked));
  }
  return live;
}

UnitForward::UnitForward(std::shared_ptr<ShardedUnit> unit)
    : unit_(std::move(unit)), call_(unit_->root()->begin_forward(*unit_)) {}

UnitForward::~UnitForward() {
  if (!ended_) unit_->root()->forward_threw(*unit_);
}

void UnitForward::take_inputs(const std::vector<at::Tensor*>& inputs) {
  std::vector<at::Tensor> given;
  for (const auto* input : inputs) given.push_back(*input);
  const auto& policy = unit_->options().mp_policy;
  if (policy.param_dtype && policy.cast_forward_inputs) {
    for (auto* input : inputs) {
      if (input->defined() && input->is_floating_point()) {
        *input = input->to(*policy.param_dtype);
      }
    }
  }
  if (call_) watch_inputs(inputs, call_);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& taken = *inputs[i];
    if (!taken.defined() || taken.is_inference()) continue;
    if (!call_ && taken.is_same(given[i])) continue;
    inputs_.push_back(
        {std::move(given[i]), taken, taken._version(), taken.grad_fn().get()});
  }
}

void UnitForward::will_return(const at::Tensor& result) {
  if (call_ && result.defined() && result.has_storage() &&
      result.requires_grad()) {
    returned_.push_back(result);
  }
}

bool UnitForward::shares_memory(const at::Tensor& result) const {
  return std::ranges::any_of(returned_, [&](const at::Tensor& other) {
    return !other.is_same(result) && other.is_alias_of(result);
  });
}

void UnitForward::returns(at::Tensor& result) {
  if (std::ranges::any_of(inputs_, [&](const Input& input) {
        return input.given.is_same(result);
      })) {
    return;  // finish_written_inputs() sees to it
  }
  const auto known = std::ranges::find_if(
      results_, [&](const auto& one) { return one.first.is_same(result); });
  if (known != results_.end()) {
    result = known->second;
    return;
  }
  const at::Tensor before = result;
  const auto& dtype = unit_->options().mp_policy.output_dtype;
  if (dtype && result.defined() && result.is_floating_point()) {
    result = result.to(*dtype);
  }
  if (watches(result) && !result.is_leaf()) {
    if (!shares_memory(result)) {
      result = announce_backward(result, call_);
    } else {
      // If the caller writes one of several views of a tensor in place,
      // autograd must know of the others. It gives the view another node, and
      // one to its base, whose graph goes on to the node that the base has now.
      announce_backward_of(result, call_);
      if (result.is_view())
        announce_backward_of(at::Tensor(result._base()), call_);
    }
  }
  results_.emplace_back(before, result);
}

void UnitForward::returns(const at::Tensor& result) {
  const auto& dtype = unit_->options().mp_policy.output_dtype;
  if (dtype && result.defined() && result.is_floating_point() &&
      result.scalar_type() != *dtype) {
    throw unit_mistake(
        "forward returns a tensor by reference, which cannot be cast to "
        "mp_policy.output_dtype; return it by value");
  }
  if (!watches(result)) return;
  if (result.is_view()) {
    throw unit_mistake(
        "forward returns a view by reference, which the caller may write in "
        "place, so that its gradients would be lost; return it by value");
  }
  announce_backward_of(result, call_);
}

bool UnitForward::watches(const at::Tensor& result) {
  if (!result.defined()) return false;
  if (unit_of(result) != nullptr) {
    throw unit_mistake(
        "forward returned a parameter or a view of one, whose memory does not "
        "stay; return a clone()");
  }
  if (!result.requires_grad()) return false;
  has_graph_ = true;
  return call_ != nullptr;
}

// The values that forward wrote in place are written in the caller's tensors,
// too: data that was cast, and the history, which autograd knows of an alias
// only.
void UnitForward::finish_written_inputs() {
  for (auto& [given, taken, version, graph] : inputs_) {
    if (taken._version() == version) continue;
    if (!call_ || taken.grad_fn().get() == graph) {
      const at::NoGradGuard no_grad;
      if (!given.is_alias_of(taken)) given.copy_(taken);
      continue;
    }
    if (given.is_leaf() && given.requires_grad() && !given.is_same(taken)) {
      throw unit_mistake(
          "forward wrote an input in place that is a leaf and requires grad, "
          "so its gradient would be wrong; write a clone() of it");
    }
    has_graph_ = true;
    const auto written = taken._version();
    given.copy_(announce_backward(taken, call_));
    // Nothing has changed since operations of forward saved the data.
    if (given.is_alias_of(taken)) {
      auto counter = torch::autograd::impl::version_counter(given);
      counter.set_version(written);
    }
  }
}

void UnitForward::end() {
  finish_written_inputs();
  unit_->root()->check_forward(has_graph_);
  ended_ = true;
  unit_->root()->end_forward(*unit_, call_.get(), has_graph_);
}

}  // namespace lockstep::internal
