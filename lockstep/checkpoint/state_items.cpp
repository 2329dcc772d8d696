#include "lockstep/checkpoint/state_items.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "lockstep/checkpoint/checked_load.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_state.h"
#include "lockstep/checkpoint/sharded/state_shards.h"
#include "lockstep/checkpoint/sharded/tensor_shard.h"
#include "lockstep/checkpoint/snapshot_error.h"
#include "lockstep/checkpoint/utf8.h"

namespace lockstep::internal {
namespace {

constexpr const char* kOneTensor = "tensor";
constexpr const char* kItemGroups = "param_groups";
constexpr const char* kItemParams = "params";
constexpr const char* kItemStep = "step";

StateTree tree_of_option(const std::string& name, const StateValue& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag;
  if (const auto* integer = std::get_if<int64_t>(&value)) return *integer;
  if (const auto* number = std::get_if<double>(&value)) return *number;
  if (const auto* list = std::get_if<std::vector<double>>(&value)) {
    StateTree::List numbers;
    for (const double number : *list) numbers.emplace_back(number);
    return numbers;
  }
  if (std::holds_alternative<at::Tensor>(value)) {
    throw std::invalid_argument("the optimizer's option " + name +
                                " is a tensor, which an item of a snapshot "
                                "cannot hold; make it a number");
  }
  return {};
}

StateValue value_of(const StateTree& tree) {
  if (const auto* flag = tree.as<bool>()) return *flag;
  if (const auto* integer = tree.as<int64_t>()) return *integer;
  if (const auto* number = tree.as<double>()) return *number;
  if (const auto* list = tree.as<StateTree::List>()) {
    std::vector<double> numbers;
    for (const StateTree& item : *list) {
      if (const auto* number = item.as<double>()) {
        numbers.push_back(*number);
      } else if (const auto* integer = item.as<int64_t>()) {
        numbers.push_back(static_cast<double>(*integer));
      } else {
        throw std::runtime_error("an option is a list of other than numbers");
      }
    }
    return numbers;
  }
  if (!tree.as<std::monostate>()) {
    throw std::runtime_error("an option is not a number");
  }
  return std::monostate();
}

ItemState state_of_optimizer(const TrainingState& state,
                             const std::string& name,
                             torch::optim::Optimizer& optimizer) {
  const OptimizerShards::State own = optimizer_state_of(optimizer);
  const auto& module = module_of_optimizer(state, name, own);
  ItemState saved{.values = values_of_groups(named_groups(own, module),
                                             own.groups.averager_step)};
  std::vector<TensorShard> shards;
  add_optimizer(own, module, kItemStateInfix, shards);
  for (TensorShard& shard : shards) {
    saved.tensors.emplace_back(std::move(shard.name), std::move(shard.tensor));
  }
  return saved;
}

[[noreturn]] void refuse_item(const std::string& name, const std::string& why) {
  throw std::invalid_argument("the item \"" + name +
                              "\" of the snapshot does not fit: " + why);
}

// Returns the saved state by this optimizer's numbers.
// `own_groups`, `names`: of its groups and its parameters by number. Throws
// std::invalid_argument if it does not fit.
OptimizerState optimizer_state_for(const ItemState& saved, OptimizerState state,
                                   const std::vector<NamedGroup>& own_groups,
                                   const std::vector<std::string>& names) {
  const auto refuse = [](const std::string& why) {
    throw std::invalid_argument(why);
  };
  state.averager_step = averager_step_of(saved.values);
  const std::vector<NamedGroup> groups = groups_of_values(saved.values);
  if (groups.size() != own_groups.size()) {
    refuse("it has " + std::to_string(groups.size()) +
           " parameter groups, the optimizer has " +
           std::to_string(own_groups.size()));
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto names_in = [](const NamedGroup& group) {
      return std::set<std::string>(group.params.begin(), group.params.end());
    };
    if (names_in(groups[g]) != names_in(own_groups[g])) {
      refuse("its group " + std::to_string(g) +
             " has other parameters than the optimizer's");
    }
    state.param_groups[g].options = groups[g].options;
  }
  std::unordered_map<std::string, int64_t> numbers;
  for (size_t i = 0; i < names.size(); ++i) {
    numbers.emplace(names[i], static_cast<int64_t>(i));
  }
  constexpr std::string_view kPrefix = kItemStateInfix;
  for (const auto& [key, tensor] : saved.tensors) {
    const size_t dot = key.rfind('.');
    const auto found =
        key.starts_with(kPrefix) && dot > kPrefix.size()
            ? numbers.find(key.substr(kPrefix.size(), dot - kPrefix.size()))
            : numbers.end();
    if (found == numbers.end()) {
      refuse("it has \"" + key +
             "\", which is of no parameter of the optimizer");
    }
    state.state[found->second][key.substr(dot + 1)] = tensor;
  }
  return state;
}

// Returns the groups, and the names of all parameters, with numbers as names.
std::pair<std::vector<NamedGroup>, std::vector<std::string>> numbered(
    const OptimizerState& state) {
  std::vector<NamedGroup> groups;
  std::vector<std::string> names;
  for (const auto& group : state.param_groups) {
    NamedGroup& named = groups.emplace_back();
    named.options = group.options;
    for (const int64_t number : group.params) {
      named.params.push_back(std::to_string(number));
    }
    names.insert(names.end(), named.params.begin(), named.params.end());
  }
  return {std::move(groups), std::move(names)};
}

}  // namespace

ItemState item_state_of(const at::Tensor& tensor) {
  return {.tensors = {{kOneTensor, tensor}}};
}

ItemState item_state_of(const std::map<std::string, int64_t>& numbers) {
  StateTree::Dict dict;
  for (const auto& [name, number] : numbers) {
    dict.items.emplace_back(name, number);
  }
  return {.values = std::move(dict)};
}

void read_item_state(const ItemState& from, at::Tensor& to) {
  if (from.tensors.size() != 1) {
    throw std::invalid_argument("the state is not one tensor");
  }
  to = from.tensors.front().second;
}

void read_item_state(const ItemState& from,
                     std::map<std::string, int64_t>& to) {
  to.clear();
  const auto* dict = from.values.as<StateTree::Dict>();
  if (!dict) throw std::invalid_argument("the state is not a dict of integers");
  for (const auto& [name, value] : dict->items) {
    const auto* number = value.as<int64_t>();
    if (!number) {
      throw std::invalid_argument("the state's \"" + name +
                                  "\" is not an integer");
    }
    to[name] = *number;
  }
}

ItemState numbered_state_of(torch::optim::Optimizer& optimizer) {
  const OptimizerState state = state_dict(optimizer);
  ItemState saved{
      .values = values_of_groups(numbered(state).first, state.averager_step)};
  for (const auto& [number, values] : state.state) {
    for (const auto& [key, value] : values) {
      const auto* tensor = std::get_if<at::Tensor>(&value);
      if (!tensor) continue;
      saved.tensors.emplace_back(
          kItemStateInfix + std::to_string(number) + "." + key, *tensor);
    }
  }
  return saved;
}

std::function<void()> prepare_numbered_state(torch::optim::Optimizer& optimizer,
                                             const ItemState& saved) {
  OptimizerState own = state_dict(optimizer);
  own.state.clear();
  const auto [groups, names] = numbered(own);
  try {
    const auto load = std::make_shared<OptimizerLoad>(
        optimizer, optimizer_state_for(saved, std::move(own), groups, names));
    return [load] { load->apply(); };
  } catch (const std::runtime_error& error) {
    throw std::invalid_argument(error.what());
  }
}

void require_item_names(const TrainingState& state) {
  for (const auto& [name, item] : state.items) {
    require_utf8(name);
    if (name.empty() || name.find('.') != std::string::npos ||
        name == "model" || name == "optimizer" || name == "lockstep") {
      throw std::invalid_argument(
          "TrainingState.items has the name \"" + name +
          "\"; give one without a dot that is not empty, \"model\", "
          "\"optimizer\" or \"lockstep\"");
    }
  }
}

nlohmann::json kinds_of_items(const TrainingState& state) {
  nlohmann::json kinds = nlohmann::json::object();
  for (const auto& [name, item] : state.items) {
    kinds[name] = item.module()        ? "a module"
                  : item.optimizer()   ? kOptimizerKind
                  : item.is_per_rank() ? "an object of each rank"
                                       : "an object";
  }
  return kinds;
}

void require_same_items(const std::vector<nlohmann::json>& all) {
  const auto first = std::ranges::find_if(
      all, [](const auto& kinds) { return !kinds.is_null(); });
  const auto first_rank = static_cast<size_t>(first - all.begin());
  for (size_t rank = first_rank + 1; rank < all.size(); ++rank) {
    if (all[rank].is_null()) continue;
    for (const auto& [has, lacks] :
         {std::pair(first_rank, rank), {rank, first_rank}}) {
      for (const auto& [name, kind] : all[has].items()) {
        const auto found = all[lacks].find(name);
        if (found != all[lacks].end() && *found == kind) continue;
        throw std::invalid_argument(
            "the item \"" + name + "\" is " + kind.get<std::string>() +
            " on rank " + std::to_string(has) + ", and rank " +
            std::to_string(lacks) +
            (found == all[lacks].end() ? " does not have it"
                                       : " has " + found->get<std::string>()) +
            "; give TrainingState::items of all ranks the same items");
      }
    }
  }
}

const torch::nn::Module& module_of_optimizer(
    const TrainingState& state, const std::string& item,
    const OptimizerShards::State& own) {
  std::vector<const torch::nn::Module*> modules{state.model.get()};
  for (const auto& [name, other] : state.items) {
    modules.push_back(other.module().get());
  }
  for (const torch::nn::Module* module : modules) {
    if (module && has_all_parameters(own, *module)) return *module;
  }
  throw std::invalid_argument(
      "the optimizer \"" + item +
      "\" of TrainingState.items has a parameter that is neither one of "
      "TrainingState.model nor, as all its other parameters, of one module in "
      "TrainingState.items, so it has no name in a snapshot; add that module, "
      "or register the modules that the optimizer steps in one module, and "
      "give "
      "that");
}

void require_loadable(const TrainingState& state) {
  require_writable(*state.model);
  for (const auto& [name, item] : state.items) {
    if (item.module()) require_writable(*item.module());
  }
}

StateTree values_of_groups(const std::vector<NamedGroup>& groups,
                           std::optional<int64_t> averager_step) {
  StateTree::List list;
  for (const NamedGroup& group : groups) {
    StateTree::Dict dict;
    for (const auto& [name, value] : group.options) {
      dict.items.emplace_back(name, tree_of_option(name, value));
    }
    StateTree::List params;
    for (const std::string& name : group.params) params.emplace_back(name);
    dict.set(kItemParams, std::move(params));
    list.emplace_back(std::move(dict));
  }
  StateTree::Dict values;
  values.set(kItemGroups, std::move(list));
  if (averager_step) values.set(kItemStep, *averager_step);
  return values;
}

std::vector<NamedGroup> groups_of_values(const StateTree& values) {
  const auto* dict = values.as<StateTree::Dict>();
  const StateTree* found = dict ? dict->find(kItemGroups) : nullptr;
  const auto* list = found ? found->as<StateTree::List>() : nullptr;
  if (!list) throw std::runtime_error("it is not the state of an optimizer");
  std::vector<NamedGroup> groups;
  for (const StateTree& item : *list) {
    NamedGroup& group = groups.emplace_back();
    const auto* options = item.as<StateTree::Dict>();
    if (!options) throw std::runtime_error("a parameter group is not a dict");
    for (const auto& [name, value] : options->items) {
      if (name != kItemParams) {
        group.options[name] = value_of(value);
        continue;
      }
      const auto* params = value.as<StateTree::List>();
      for (size_t i = 0; params && i < params->size(); ++i) {
        const auto* text = (*params)[i].as<std::string>();
        if (!text) throw std::runtime_error("a parameter has no name");
        group.params.push_back(*text);
      }
    }
  }
  return groups;
}

std::optional<int64_t> averager_step_of(const StateTree& values) {
  const auto* dict = values.as<StateTree::Dict>();
  const StateTree* found = dict ? dict->find(kItemStep) : nullptr;
  const auto* step = found ? found->as<int64_t>() : nullptr;
  return step ? std::optional(*step) : std::nullopt;
}

std::map<std::string, ItemState> items_for_file(const TrainingState& state,
                                                bool objects) {
  std::map<std::string, ItemState> items;
  for (const auto& [name, item] : state.items) {
    if (item.is_object() && !objects) continue;
    if (item.module()) {
      items[name].tensors = state_dict(*item.module());
    } else if (item.optimizer()) {
      items[name] = state_of_optimizer(state, name, *item.optimizer());
    } else {
      items[name] = item.state_dict();
    }
  }
  return items;
}

std::unique_ptr<PreparedOptimizer> prepare_shards(OptimizerShards& optimizer,
                                                  OptimizerState state) {
  const auto parts = optimizer.shards().parts;
  OptimizerState local;
  for (size_t part = 0; part < parts.size(); ++part) {
    const auto found = state.state.find(parts[part].parameter);
    if (found == state.state.end()) continue;
    local.state[static_cast<int64_t>(part)] = std::move(found->second);
  }
  state.state.clear();
  return optimizer.prepare_load(state, local);
}

void restore_numbers(const Snapshot& saved, TrainingState& state,
                     std::vector<std::string>& not_restored) {
  const auto restore = [&](const char* name, const auto& from, auto& to,
                           bool is_used) {
    if (!saved.absent.contains(name)) {
      to = from;
    } else if (is_used) {
      not_restored.emplace_back(name);
    }
  };
  restore("epochs_run", saved.epochs_run, state.epochs_run, true);
  restore("step", saved.step, state.step, true);
  restore("sampler_state", saved.sampler_state, state.sampler_state, true);
  restore("metadata", saved.metadata, state.metadata, !state.metadata.empty());
}

void with_name_of_item(const std::string& name,
                       const std::function<void()>& prepare) {
  try {
    prepare();
  } catch (const SnapshotError&) {
    throw;
  } catch (const std::system_error&) {
    throw;
  } catch (const std::runtime_error& error) {
    refuse_item(name, error.what());
  } catch (const std::invalid_argument& error) {
    const std::string words = error.what();
    if (words.starts_with("the item \"")) throw;
    refuse_item(name, words);
  }
}

std::function<void()> prepare_item(const TrainingState& state,
                                   const std::string& name,
                                   const StateItem& item,
                                   const ItemState& saved) {
  std::function<void()> load;
  with_name_of_item(name, [&] {
    if (item.module()) {
      (void)check_state_dict(*item.module(), saved.tensors);
      load = [module = item.module(), tensors = saved.tensors] {
        load_state_dict(*module, tensors);
      };
      return;
    }
    if (!item.optimizer()) {
      load = item.prepare_load(saved);
      return;
    }
    const OptimizerShards::State own = optimizer_state_of(*item.optimizer());
    const auto& module = module_of_optimizer(state, name, own);
    OptimizerState by_number = optimizer_state_for(
        saved, own.groups, named_groups(own, module), names_of(own, module));
    std::shared_ptr<PreparedOptimizer> prepared;
    if (auto* sharded = dynamic_cast<OptimizerShards*>(item.optimizer())) {
      prepared = prepare_shards(*sharded, std::move(by_number));
    } else {
      prepared = std::make_shared<OptimizerLoad>(*item.optimizer(), by_number);
    }
    load = [prepared] { prepared->apply(); };
  });
  return load;
}

}  // namespace lockstep::internal
