#include "lockstep/parallel/fsdp/unit_hooks.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "lockstep/parallel/fsdp/flat_parameters.h"
#include "lockstep/parallel/fsdp/sharded_unit.h"

namespace lockstep::internal {
namespace {

using torch::autograd::variable_list;

// Runs before autograd processes the node that made a result.
class UnitResultHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit UnitResultHook(std::shared_ptr<UnitCall> call)
      : call_(std::move(call)) {}
  variable_list operator()(const variable_list& grads) override {
    call_->unit->before_backward(*call_);
    return grads;
  }

 private:
  const std::shared_ptr<UnitCall> call_;
};

struct HeldCall : torch::CustomClassHolder {
  explicit HeldCall(std::shared_ptr<UnitCall> held) : call(std::move(held)) {}
  std::shared_ptr<UnitCall> call;
};

const std::shared_ptr<UnitCall>& held_call(
    torch::autograd::AutogradContext* context) {
  return static_cast<HeldCall*>(context->saved_data["call"].toCapsule().get())
      ->call;
}

struct UnitResult : torch::autograd::Function<UnitResult> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& result,
                            const c10::intrusive_ptr<HeldCall>& call) {
    context->saved_data["call"] = at::IValue::make_capsule(call);
    return result.detach();
  }
  static variable_list backward(torch::autograd::AutogradContext* context,
                                variable_list grads) {
    auto& call = *held_call(context);
    call.unit->before_backward(call);
    grads.emplace_back();  // of the call, which is not a tensor
    return grads;
  }
};

struct UnitInputs : torch::autograd::Function<UnitInputs> {
  static variable_list forward(torch::autograd::AutogradContext* context,
                               at::TensorList inputs,
                               const c10::intrusive_ptr<HeldCall>& call) {
    context->set_materialize_grads(false);
    context->saved_data["call"] = at::IValue::make_capsule(call);
    // Not the inputs themselves, which the module could not change in place.
    variable_list aliases;
    for (const at::Tensor& input : inputs) aliases.push_back(input.detach());
    return aliases;
  }
  static variable_list backward(torch::autograd::AutogradContext* context,
                                variable_list grads) {
    const auto& call = held_call(context);
    call->unit->after_backward(*call);
    // With create_graph the graph of a gradient leads into the unit again.
    for (auto& grad : grads) {
      if (grad.defined() && grad.requires_grad()) {
        grad = announce_backward(grad, call);
      }
    }
    grads.emplace_back();  // of the call, which is not a tensor
    return grads;
  }
};

class UnitGradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit UnitGradientHook(std::weak_ptr<ShardedUnit> unit)
      : unit_(std::move(unit)) {}
  void operator()(const at::Tensor& /*parameter*/) override {
    if (const auto unit = unit_.lock()) unit->gradient_came();
  }

 private:
  const std::weak_ptr<ShardedUnit> unit_;
};

// Only the graph task holds this mark. The task reaches it when all its work is
// done; if an exception ends the task, the mark is destroyed unreached.
class UnitEndMark {
 public:
  UnitEndMark(std::function<void()> ended, std::function<void()> died)
      : ended_(std::move(ended)), died_(std::move(died)) {}
  UnitEndMark(const UnitEndMark&) = delete;
  UnitEndMark& operator=(const UnitEndMark&) = delete;
  ~UnitEndMark() {
    if (died_) died_();
  }
  void reach() {
    // If `ended` throws, the backward dies.
    ended_();
    died_ = nullptr;
  }

 private:
  const std::function<void()> ended_;
  std::function<void()> died_;
};

}  // namespace

at::Tensor announce_backward(const at::Tensor& result,
                             const std::shared_ptr<UnitCall>& call) {
  return UnitResult::apply(result, c10::make_intrusive<HeldCall>(call));
}

void announce_backward_of(const at::Tensor& result,
                          const std::shared_ptr<UnitCall>& call) {
  if (const auto& node = result.grad_fn()) {
    node->add_pre_hook(std::make_unique<UnitResultHook>(call));
  }
}

void watch_inputs(const std::vector<at::Tensor*>& inputs,
                  const std::shared_ptr<UnitCall>& call) {
  variable_list watched;
  std::vector<std::pair<at::Tensor*, size_t>> places;
  for (auto* input : inputs) {
    if (!input->defined() || !input->requires_grad()) continue;
    const auto known = std::ranges::find_if(
        watched, [&](const at::Tensor& one) { return one.is_same(*input); });
    places.emplace_back(input, known - watched.begin());
    if (known == watched.end()) watched.push_back(*input);
  }
  if (watched.empty()) return;
  const auto aliases =
      // A vector would not be recognised as tensors.
      UnitInputs::apply(at::TensorList(watched),
                        c10::make_intrusive<HeldCall>(call));
  for (const auto& [place, alias] : places) *place = aliases[alias];
}

void watch_gradient(const at::Tensor& parameter,
                    std::weak_ptr<ShardedUnit> unit) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      parameter, std::make_unique<UnitGradientHook>(std::move(unit)));
}

void at_end_of_backward(std::function<void()> ended,
                        std::function<void()> died) {
  torch::autograd::Engine::get_default_engine().queue_callback(
      [mark = std::make_shared<UnitEndMark>(
           std::move(ended), std::move(died))] { mark->reach(); });
}

bool accumulates_into(const std::vector<at::Tensor>& tensors) {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (info == nullptr || info->empty()) return true;
  return std::ranges::any_of(tensors, [&](const at::Tensor& tensor) {
    const auto accumulator =
        torch::autograd::impl::try_get_grad_accumulator(tensor);
    const auto found = info->find(accumulator.get());
    return found != info->end() && found->second.needed_;
  });
}

std::vector<at::Tensor> graph_leaves(
    const std::vector<at::Tensor>& results,
    const std::function<bool(const torch::autograd::Node&)>& follow) {
  using torch::autograd::AccumulateGrad;
  using torch::autograd::Node;
  std::vector<at::Tensor> leaves;
  std::vector<const Node*> open;
  for (const at::Tensor& result : results) {
    open.push_back(result.grad_fn().get());
  }
  std::unordered_set<const Node*> seen;
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second || !follow(*node)) {
      continue;
    }
    for (const auto& edge : node->next_edges()) {
      open.push_back(edge.function.get());
    }
    const auto* leaf = dynamic_cast<const AccumulateGrad*>(node);
    if (leaf != nullptr && unit_of(leaf->variable) == nullptr) {
      leaves.push_back(leaf->variable);
    }
  }
  return leaves;
}

}  // namespace lockstep::internal
