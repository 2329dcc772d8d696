#include "lockstep/parallel/pipeline/stage_replicas.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "lockstep/parallel/fsdp/flat_parameters.h"
#include "lockstep/parallel/fsdp/sharding_root.h"

namespace lockstep::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A zero whose gradient is zero for each of some tensors.
struct ZeroOf : torch::autograd::Function<ZeroOf> {
  static at::Tensor forward(AutogradContext* context, at::TensorList tensors) {
    context->save_for_backward(tensors.vec());
    return at::zeros({}, tensors.front().options());
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& /*gradients*/) {
    variable_list zeros;
    for (const at::Tensor& tensor : context->get_saved_variables()) {
      zeros.push_back(at::zeros({}, tensor.options()).expand(tensor.sizes()));
    }
    return zeros;
  }
};

class DdpReplicas final : public StageReplicas {
 public:
  DdpReplicas(DdpState& state, std::shared_ptr<torch::nn::Module> module)
      : state_(state), module_(std::move(module)) {}

  void begin(bool training) override {
    state_.await_parameters();
    if (training) state_.note_forward();
    versions_ = state_.versions();
  }
  void finish(bool training) override {
    state_.require_unwritten(versions_);
    if (!training) return;
    const auto parameters = module_->parameters();
    if (std::ranges::none_of(parameters, &at::Tensor::requires_grad)) return;
    // A parameter without a gradient is unused, as the wrapper understands it.
    // The first tensor gives the zero a graph if all are.
    variable_list used{
        at::empty({0}, parameters.front().options()).requires_grad_()};
    std::ranges::copy_if(
        parameters, std::back_inserter(used), [](const at::Tensor& parameter) {
          return parameter.requires_grad() && parameter.grad().defined();
        });
    at::Tensor zero;
    {
      DdpState::ForwardPass pass(state_);
      zero = ZeroOf::apply(at::TensorList(used));
      pass.returns(zero);
    }
    zero.backward();
  }

  std::vector<ProcessGroupPtr> groups() const override {
    return {state_.process_group()};
  }

 private:
  DdpState& state_;
  const std::shared_ptr<torch::nn::Module> module_;
  std::vector<uint32_t> versions_;
};

class ShardedReplicas final : public StageReplicas {
 public:
  explicit ShardedReplicas(std::shared_ptr<ShardedUnit> unit)
      : unit_(std::move(unit)) {}

  void begin(bool /*training*/) override {
    unit_->root()->begin_micro_batches();
  }
  void after_backward() override { unit_->root()->keep_gradients(); }
  void finish(bool training) override {
    unit_->root()->end_micro_batches(training);
  }
  void give_up() noexcept override { unit_->root()->give_up(); }

  std::vector<ProcessGroupPtr> groups() const override {
    std::vector<ProcessGroupPtr> groups{unit_->options().group};
    if (const auto& replicas = unit_->options().replicate_group) {
      groups.push_back(replicas);
    }
    return groups;
  }

 private:
  const std::shared_ptr<ShardedUnit> unit_;
};

}  // namespace

std::shared_ptr<StageReplicas> replicas_of(
    DdpState& state, std::shared_ptr<torch::nn::Module> module) {
  if (state.lowers_parameters()) {
    throw std::invalid_argument(
        "a stage of a pipeline cannot be a DistributedDataParallel with "
        "mixed_precision; use Autocast in the module's forward");
  }
  return std::make_shared<DdpReplicas>(state, std::move(module));
}

std::shared_ptr<StageReplicas> replicas_of(std::shared_ptr<ShardedUnit> unit) {
  if (!unit->is_outermost()) {
    throw std::invalid_argument(
        "a stage of a pipeline cannot be a FullyShard inside another one; give "
        "the outermost unit of the stage");
  }
  return std::make_shared<ShardedReplicas>(std::move(unit));
}

std::vector<at::Tensor> forward_unit(
    const std::shared_ptr<ShardedUnit>& unit, std::vector<at::Tensor> inputs,
    const std::function<
        std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& call) {
  UnitForward pass(unit);
  std::vector<at::Tensor*> places;
  for (at::Tensor& input : inputs) places.push_back(&input);
  pass.take_inputs(places);
  std::vector<at::Tensor> results = call(inputs);
  for (const at::Tensor& result : results) pass.will_return(result);
  for (at::Tensor& result : results) pass.returns(result);
  pass.end();
  return results;
}

void require_no_units(int stage, const torch::nn::Module& module) {
  for (const auto& parameter : module.named_parameters()) {
    if (unit_of(parameter.value()) == nullptr) continue;
    throw std::invalid_argument(c10::str(
        "stage ", stage, " of a pipeline is a ", module.name(),
        " with parameter ", parameter.key(),
        " in a FullyShard; make a FullyShard of the whole module of the stage, "
        "and give that to PipelineStage"));
  }
}

}  // namespace lockstep::internal
