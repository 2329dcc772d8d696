#pragma once

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/state/state_tree.h"

namespace lockstep::internal {

// Throws std::invalid_argument: a state cannot be loaded into this scheduler.
[[noreturn]] void refuse_state(const char* scheduler, const std::string& why);

// Return what a state has under `name`; call refuse_state() if that is
// something else. A number may be an int or a float.
double number_in(const StateTree& value, const char* scheduler,
                 const std::string& name);
const StateTree::List& list_in(const StateTree& value, const char* scheduler,
                               const std::string& name);

// The state of one scheduler, under Python's names, described once for
// state_dict() and for load_state_dict(). It refers to the scheduler's members.
//
// Integers are refused beyond +-2^53, so that arithmetic on those of a hostile
// file does not overflow.
class StateFields {
 public:
  static constexpr int64_t kMost = int64_t{1} << 53;

  explicit StateFields(const char* scheduler) : scheduler_(scheduler) {}

  void add(const char* name, double& place);
  void add(const char* name, std::optional<double>& place);
  // Refuses values below `least`.
  void add(const char* name, int64_t& place, int64_t least = -kMost);
  // Refuses more than `most` elements.
  void add(const char* name, std::vector<double>& place, size_t most);
  // Refuses another number of elements than `size`.
  void add(const char* name, std::vector<int64_t>& place, size_t size);
  void add(const char* name, StateTree::Counter& place);
  // A member of an enumeration whose values 0, 1, ... Python calls `texts`.
  template <class Enum>
  void add(const char* name, Enum& place,
           std::initializer_list<const char*> texts) {
    add_text(
        name, {texts.begin(), texts.end()},
        [&place] { return static_cast<size_t>(place); },
        [&place](size_t index) { place = static_cast<Enum>(index); });
  }

  // Something that this library has no use for; it is not read.
  void add_constant(const char* name, StateTree value);
  // Something that cannot be restored; a state with another value is refused.
  void add_fixed(const char* name, StateTree value);

  using Capture = std::function<StateTree()>;
  // Checks a value, and returns what stores it and does not throw.
  using Restore = std::function<std::function<void()>(const StateTree&)>;
  void add(const char* name, Capture capture, Restore restore);

  const char* scheduler() const { return scheduler_; }

  StateTree::Dict capture() const;

  // Checks everything, and returns what stores it, which does not throw.
  // Throws std::invalid_argument if something is missing or wrong, or if the
  // state has something that only schedulers of other kinds have.
  std::function<void()> restore(const StateTree& state) const;

 private:
  struct Field {
    const char* name;
    Capture capture;
    Restore restore;  // null if it is not read
  };

  void add_text(const char* name, std::vector<std::string> texts,
                std::function<size_t()> get, std::function<void(size_t)> set);

  const char* scheduler_;
  std::vector<Field> fields_;
};

// An optimizer's parameter groups as schedulers use them: their learning rates
// and momenta, and the named numbers that Python's schedulers keep in
// optimizer.param_groups, for which LibTorch's groups have no place
// ("initial_lr", "max_lr", "swa_lr"). The parts of one scheduler share an
// object of this class, so that they find each other's numbers as in Python.
class SchedulerGroups {
 public:
  using Values = std::map<std::string, double>;

  // `optimizer` must outlive this object. Groups may be added to it later.
  explicit SchedulerGroups(torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer) {}

  size_t size() const { return optimizer_.param_groups().size(); }

  double lr(size_t group) const;
  std::vector<double> lrs() const;
  void set_lr(size_t group, double lr) const;

  // Returns the group's learning rate before the first scheduler changed it:
  // the number "initial_lr", which is set to the present rate if there is none.
  double initial_lr(size_t group);

  Values& values(size_t group);
  double value(size_t group, const std::string& name);

  // Throws std::invalid_argument, naming `scheduler`, if the optimizer has
  // neither a momentum (SGD, RMSprop) nor a beta1 (Adam, AdamW).
  void require_momentum(const char* scheduler) const;
  // Returns whether set_momentum() sets the first of Adam's betas.
  bool has_beta1() const;
  void set_momentum(size_t group, double momentum) const;

  // The named numbers, by group: `param_groups` of ResumableScheduler.
  StateTree state() const;
  // Returns a function that takes over those in `state`, which is such a list
  // or nullptr, and does not throw. Other numbers in it are ignored. Throws
  // std::invalid_argument, naming `scheduler`, for anything else and for more
  // groups than there are.
  std::function<void()> prepare_load(const StateTree* state,
                                     const char* scheduler);

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<Values> values_;
};

using SchedulerGroupsPtr = std::shared_ptr<SchedulerGroups>;

}  // namespace lockstep::internal
