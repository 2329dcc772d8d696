#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep {

namespace internal {

// Conversions between what a state_dict() returns and what a snapshot holds.
// For another type, to_state_tree(state) and from_state_tree(tree, state) are
// looked up where the type is.
inline ItemState item_state_of(ItemState state) { return state; }
inline ItemState item_state_of(StateTree values) {
  return {.values = std::move(values)};
}
inline ItemState item_state_of(NamedTensors tensors) {
  return {.tensors = std::move(tensors)};
}
ItemState item_state_of(const at::Tensor& tensor);
ItemState item_state_of(const std::map<std::string, int64_t>& numbers);
template <class State>
  requires requires(const State& state) { to_state_tree(state); }
ItemState item_state_of(const State& state) {
  return {.values = to_state_tree(state)};
}
template <class State>
ItemState item_state_of(const std::optional<State>& state) {
  return state ? item_state_of(*state) : ItemState{};
}

inline void read_item_state(const ItemState& from, ItemState& to) { to = from; }
inline void read_item_state(const ItemState& from, StateTree& to) {
  to = from.values;
}
inline void read_item_state(const ItemState& from, NamedTensors& to) {
  to = from.tensors;
}
void read_item_state(const ItemState& from, at::Tensor& to);
void read_item_state(const ItemState& from, std::map<std::string, int64_t>& to);
template <class State>
  requires requires(const StateTree& tree, State& state) {
    from_state_tree(tree, state);
  }
void read_item_state(const ItemState& from, State& to) {
  from_state_tree(from.values, to);
}
template <class State>
void read_item_state(const ItemState& from, std::optional<State>& to) {
  if (from.values.as<std::monostate>() && from.tensors.empty()) {
    to.reset();
  } else {
    read_item_state(from, to.emplace());
  }
}

// The state of an optimizer whose parameters are told apart by their numbers,
// for per_rank(); and the checks for loading it, with what loads.
ItemState numbered_state_of(torch::optim::Optimizer& optimizer);
std::function<void()> prepare_numbered_state(torch::optim::Optimizer& optimizer,
                                             const ItemState& state);

}  // namespace internal

// An item of TrainingState::items: a part of the training that a snapshot saves
// and restores under a name. It is made of
//
// - a module: a holder, a std::shared_ptr, or a reference (an AveragedModel);
// - a torch::optim::Optimizer, all of whose parameters are those of
//   TrainingState::model or of one module in the items;
// - any object with `state_dict()` and `load_state_dict(state)`: GradScaler,
//   samplers, schedulers, metrics, MetricsLogger, and your own. The state is
//   one of StateTree (numbers, texts, lists, dicts), NamedTensors, whose order
//   is kept, at::Tensor, std::map<std::string, int64_t>, or ItemState, which
//   has values and tensors.
//   If the object has `prepare_load(state)` as ResumableScheduler, that is
//   called instead.
//
// An object that is given by reference must outlive the item. Its state is that
// of the first rank, unless per_rank() says otherwise or the object's type has
// a static member `state_is_per_rank` that is true, as metrics have. Its
// state_dict() is called on all ranks, and also before the training, by
// load_snapshot() and SnapshotSaver, to see whether the snapshot can hold it.
//
// load_state_dict() of your own should throw std::invalid_argument for a state
// that does not fit. It is called after all checks of the other parts, so if it
// throws, the training is restored in part, and the error says so.
class StateItem {
 public:
  template <std::derived_from<torch::nn::Module> Impl>
  StateItem(std::shared_ptr<Impl> module) : module_(std::move(module)) {}
  template <class Impl>
  StateItem(const torch::nn::ModuleHolder<Impl>& holder)
      : module_(holder.ptr()) {}
  StateItem(torch::nn::Module& module)
      : module_(std::shared_ptr<void>(), &module) {}
  StateItem(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}

  template <class Object>
    requires(!std::derived_from<Object, torch::nn::Module> &&
             !std::derived_from<Object, torch::optim::Optimizer> &&
             requires(Object& object) {
               object.load_state_dict(object.state_dict());
             })
  StateItem(Object& object)
      : save_(
            [&object] { return internal::item_state_of(object.state_dict()); }),
        prepare_([&object](const ItemState& from) -> std::function<void()> {
          std::decay_t<decltype(object.state_dict())> state;
          internal::read_item_state(from, state);
          if constexpr (requires { object.prepare_load(state); }) {
            return object.prepare_load(state);
          } else {
            return [&object, state = std::move(state)] {
              object.load_state_dict(state);
            };
          }
        }) {
    if constexpr (requires { Object::state_is_per_rank; }) {
      per_rank_ = Object::state_is_per_rank;
    }
    is_sampler_ = requires { object.begin_pass(); };
    if constexpr (requires { object.next_pass_state(); }) {
      next_pass_ = [&object] {
        return internal::item_state_of(object.next_pass_state());
      };
    }
  }

  // Exactly one of these three is set.
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  torch::optim::Optimizer* optimizer() const { return optimizer_; }
  bool is_object() const { return save_ != nullptr; }

  // For an object: returns its state; makes the checks that come before
  // loading, and returns what loads.
  ItemState state_dict() const { return save_(); }
  std::function<void()> prepare_load(const ItemState& state) const {
    return prepare_(state);
  }
  bool is_per_rank() const { return per_rank_; }
  // Whether the object decides which samples a DataLoader visits.
  bool is_sampler() const { return is_sampler_; }
  // For a sampler: returns the state with which another one begins the pass
  // that this one would begin now (ResumableSampler::next_pass_state()), or
  // state_dict() if it has no such function.
  ItemState next_pass_state() const {
    return next_pass_ ? next_pass_() : save_();
  }

  // Returns an item whose state each rank saves and restores by itself: of an
  // object, or of an optimizer that is not sharded and whose state differs
  // between ranks (PostLocalSGDOptimizer with momentum), which must have its
  // parameters in the same order. Only a folder of snapshots can hold it, and
  // another number of ranks does not restore it. Throws std::invalid_argument
  // for a module, whose parts are known by their layout.
  friend StateItem per_rank(StateItem item) {
    if (item.module_) {
      throw std::invalid_argument(
          "per_rank() was given a module; give an optimizer, or an object with "
          "state_dict() and load_state_dict()");
    }
    if (auto* optimizer = std::exchange(item.optimizer_, nullptr)) {
      item.save_ = [optimizer] {
        return internal::numbered_state_of(*optimizer);
      };
      item.prepare_ = [optimizer](const ItemState& state) {
        return internal::prepare_numbered_state(*optimizer, state);
      };
    }
    item.per_rank_ = true;
    return item;
  }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  torch::optim::Optimizer* optimizer_{nullptr};
  std::function<ItemState()> save_;
  std::function<ItemState()> next_pass_;
  std::function<std::function<void()>(const ItemState&)> prepare_;
  bool per_rank_{false};
  bool is_sampler_{false};
};

// Found in this namespace, too, for per_rank(scaler).
StateItem per_rank(StateItem item);

}  // namespace lockstep
