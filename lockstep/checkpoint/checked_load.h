#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/module_state.h"
#include "lockstep/checkpoint/optimizer_interfaces.h"
#include "lockstep/checkpoint/snapshot.h"
#include "lockstep/comm/tensor_layout.h"

// state_dict() and load_state_dict() (module_state.h, optimizer_state.h) in
// steps, so that a caller can check several things before it changes the first.
namespace lockstep::internal {

// The prefix of all names in a model that Python's DistributedDataParallel
// wraps.
inline constexpr std::string_view kWrapperPrefix = "module.";

// Returns what load_tensors() returns and, with undefined tensors, the names of
// what it leaves out.
NamedTensors load_state_dict_file(const std::string& path,
                                  const std::string& key);

// Does the same as load_state_dict() of a module.
struct ModuleLoad {
  // {tensor of the state, tensor of the module}, in the module's order
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  IncompatibleKeys incompatible;
};

// Throws what load_state_dict() would throw, and changes nothing. Looks only at
// shapes and dtypes: the tensors of `state` may be without memory. An undefined
// one stands for a value that is not a tensor, which no module here has. The
// tensor of a copy is the whole one if that of the module is a part by its
// layout.
ModuleLoad check_state_dict(const torch::nn::Module& module,
                            const NamedTensors& state,
                            const LoadStateDictOptions& options = {});

// Throws the error of check_state_dict() if there are such keys.
void require_same_keys(const IncompatibleKeys& keys);

// A tensor of state_dict(module).
struct ModuleTensor {
  std::string name;
  at::Tensor tensor;  // the module's own, not detached
  bool is_parameter;  // otherwise a buffer
};
std::vector<ModuleTensor> tensors_of(const torch::nn::Module& module);

// Returns the shape of the whole tensor if `tensor`, which is one of the module
// or is to be loaded into it, is only a part of it; nullptr otherwise.
const Sizes* shape_if_part(const at::Tensor& tensor,
                           const at::Tensor& of_module);

// Throws std::invalid_argument if a tensor that was given is the part of some
// rank, which need not be this one.
void require_whole_tensors(const ModuleLoad& load,
                           const torch::nn::Module& module);

// Throws std::invalid_argument for a tensor into which nothing can be loaded,
// as check_state_dict() does.
void require_writable(const torch::nn::Module& module);

// Returns the name of each parameter; of a parameter that has several, the
// first, as Python's named_parameters() does.
std::unordered_map<const c10::TensorImpl*, std::string> parameter_names(
    const torch::nn::Module& module);

// The names that the parameters of a module have when this object is made.
class ParameterNames {
 public:
  explicit ParameterNames(const torch::nn::Module& module);

  // Returns the first name of a parameter; "" if it is not the module's.
  std::string of(const at::Tensor& parameter) const;
  // Each name that a parameter has, with its first.
  const std::map<std::string, std::string>& known() const { return known_; }

 private:
  std::unordered_map<const c10::TensorImpl*, std::string> first_;
  std::map<std::string, std::string> known_;
};

// Returns state_dict() of the optimizer with these names.
OptimizerState named_state_dict(const torch::optim::Optimizer& optimizer,
                                const ParameterNames& names);

bool has_names(const OptimizerState& state);

// Returns the state, which must have names, with the parameters of each group
// in the order that they have in `optimizer`. Throws std::invalid_argument if
// the names do not fit; another number of groups is left to OptimizerLoad.
OptimizerState in_order_of(const torch::optim::Optimizer& optimizer,
                           const OptimizerState& state,
                           const ParameterNames& names);

// Throws std::invalid_argument for a state without names, unless it is empty.
void require_names(const OptimizerState& state);

// Returns the optimizer state of `snapshot`, which must have one, with the
// parameters of each group in the order that they have in `optimizer`: found by
// their names in `module`. A state without names is returned as it is. `load`:
// what check_state_dict() made of the snapshot's model. Throws
// std::invalid_argument if the names do not fit, or if there are none and the
// parameters of the model are in another order than in the snapshot.
OptimizerState ordered_state(const Snapshot& snapshot, const ModuleLoad& load,
                             const torch::optim::Optimizer& optimizer,
                             const torch::nn::Module& module);

// Throws std::invalid_argument if state_dict() would.
void require_state_dict(const torch::optim::Optimizer& optimizer);

// load_state_dict() of an optimizer: the constructor makes all checks and may
// throw, apply() does not throw for a wrong state.
class OptimizerLoad : public PreparedOptimizer {
 public:
  // `optimizer` must outlive this object and keep its parameters. `adopt`:
  // whether tensors of `state` that have their parameter's dtype, device and
  // layout become those of the optimizer, so that nothing is copied.
  OptimizerLoad(torch::optim::Optimizer& optimizer, const OptimizerState& state,
                bool adopt = false);
  ~OptimizerLoad() override;
  OptimizerLoad(const OptimizerLoad&) = delete;
  OptimizerLoad& operator=(const OptimizerLoad&) = delete;

  void apply() override;

 private:
  struct Prepared;
  OptimizerWrapper* wrapper_;  // of optimizer_, or null
  torch::optim::Optimizer& optimizer_;
  std::optional<int64_t> averager_step_;
  std::unique_ptr<Prepared> prepared_;
};

}  // namespace lockstep::internal
