#include "lockstep/parallel/nn/convert_sync_batchnorm.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "lockstep/parallel/nn/sync_batch_norm.h"

namespace lockstep::nn {
namespace {

using torch::nn::AnyModule;
using torch::nn::Module;
using torch::nn::ModuleDictImpl;
using torch::nn::ModuleListImpl;
using torch::nn::SequentialImpl;
using ModulePtr = std::shared_ptr<Module>;

bool is_batch_norm(const Module& module) {
  return module.as<torch::nn::BatchNorm1dImpl>() ||
         module.as<torch::nn::BatchNorm2dImpl>() ||
         module.as<torch::nn::BatchNorm3dImpl>();
}

template <typename Sync, typename Plain>
std::optional<AnyModule> synchronized(const Module& module,
                                      const ProcessGroupPtr& process_group) {
  if (typeid(module) != typeid(Plain)) return std::nullopt;
  const auto& plain = static_cast<const Plain&>(module);
  auto options = SyncBatchNormOptions(plain.options);
  options.process_group(process_group);
  auto sync = std::make_shared<Sync>(
      SyncBatchNormState{.options = std::move(options),
                         .weight = plain.weight,
                         .bias = plain.bias,
                         .running_mean = plain.running_mean,
                         .running_var = plain.running_var,
                         .num_batches_tracked = plain.num_batches_tracked});
  sync->train(plain.is_training());
  return AnyModule(std::move(sync));
}

// Returns none for a class that is derived from a batch norm.
std::optional<AnyModule> synchronized(const Module& module,
                                      const ProcessGroupPtr& process_group) {
  using namespace torch::nn;
  auto sync =
      synchronized<SyncBatchNorm1dImpl, BatchNorm1dImpl>(module, process_group);
  if (!sync) {
    sync = synchronized<SyncBatchNorm2dImpl, BatchNorm2dImpl>(module,
                                                              process_group);
  }
  if (!sync) {
    sync = synchronized<SyncBatchNorm3dImpl, BatchNorm3dImpl>(module,
                                                              process_group);
  }
  return sync;
}

SyncBatchNormState* sync_state(Module& module) {
  if (auto* sync = module.as<SyncBatchNorm1dImpl>()) return sync;
  if (auto* sync = module.as<SyncBatchNorm2dImpl>()) return sync;
  return module.as<SyncBatchNorm3dImpl>();
}

// Returns whether `child` is an element of the container `parent`.
bool is_element(const Module& parent, const ModulePtr& child) {
  if (auto* sequential = parent.as<SequentialImpl>()) {
    return std::any_of(
        sequential->begin(), sequential->end(),
        [&](const AnyModule& any) { return any.ptr() == child; });
  }
  if (auto* list = parent.as<ModuleListImpl>()) {
    return std::find(list->begin(), list->end(), child) != list->end();
  }
  if (auto* dict = parent.as<ModuleDictImpl>()) {
    auto values = dict->values();
    return std::find(values.begin(), values.end(), child) != values.end();
  }
  return false;
}

void replace_element(Module& parent, const std::string& name,
                     const ModulePtr& child, const AnyModule& sync) {
  if (auto* sequential = parent.as<SequentialImpl>()) {
    for (AnyModule& any : *sequential) {
      if (any.ptr() == child) any = sync;
    }
  } else if (auto* list = parent.as<ModuleListImpl>()) {
    std::replace(list->begin(), list->end(), child, sync.ptr());
  } else if (auto* dict = parent.as<ModuleDictImpl>()) {
    for (const auto& [key, value] : dict->items()) {
      if (value == child) dict->update({{key, sync.ptr()}});
    }
  }
  parent.replace_module(name, sync.ptr());
}

// Collects all changes before the first is made.
class Conversion {
 public:
  explicit Conversion(const ProcessGroupPtr& process_group)
      : process_group_(process_group.require_member()) {}

  void look_at(Module& module, const std::string& path) {
    if (is_batch_norm(module)) {
      refused_.push_back(described(module, path));
    } else if (auto* sync = sync_state(module)) {
      regrouped_.push_back(sync);
    }
    for (const auto& item : module.named_children()) {
      const ModulePtr& child = item.value();
      std::string child_path =
          path.empty() ? item.key() : path + '.' + item.key();
      if (is_batch_norm(*child) && is_element(module, child) &&
          add_replacement(*child)) {
        places_.push_back({&module, item.key(), child});
      } else {
        look_at(*child, child_path);
      }
    }
  }

  void carry_out() {
    if (!refused_.empty()) throw std::invalid_argument(refusal());
    for (const Place& place : places_) {
      replace_element(*place.parent, place.name, place.child,
                      replacements_.at(place.child.get()));
    }
    for (SyncBatchNormState* sync : regrouped_) {
      sync->options.process_group(process_group_);
    }
  }

 private:
  struct Place {
    Module* parent;
    std::string name;
    ModulePtr child;
  };

  bool add_replacement(const Module& child) {
    if (replacements_.contains(&child)) return true;
    auto sync = synchronized(child, process_group_);
    if (sync) replacements_.emplace(&child, std::move(*sync));
    return sync.has_value();
  }

  static std::string described(const Module& module, const std::string& path) {
    return (path.empty() ? "the module itself" : path) + " (" + module.name() +
           ')';
  }

  std::string refusal() const {
    std::string names;
    for (const std::string& name : refused_) {
      names += (names.empty() ? "" : ", ") + name;
    }
    return "convert_sync_batchnorm: cannot replace " + names +
           ". LibTorch lets only children of Sequential, ModuleList and "
           "ModuleDict be replaced, and only plain BatchNorm1d, 2d and 3d "
           "have a counterpart. Declare these as "
           "lockstep::nn::SyncBatchNorm1d, 2d or 3d, which take the same "
           "options. Nothing was converted";
  }

  ProcessGroupPtr process_group_;
  std::vector<std::string> refused_;
  std::vector<Place> places_;
  // Indexed by the batch norm that is replaced.
  std::map<const Module*, AnyModule> replacements_;
  std::vector<SyncBatchNormState*> regrouped_;
};

}  // namespace

void convert_sync_batchnorm(torch::nn::Module& module,
                            const ProcessGroupPtr& process_group) {
  Conversion conversion(process_group);
  conversion.look_at(module, "");
  conversion.carry_out();
}

}  // namespace lockstep::nn
