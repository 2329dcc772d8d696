#include "tests/parallel/fuzz/reference.h"

#include "tests/parallel/fuzz/operations.h"

namespace lockstep::internal::fuzz {

std::unique_ptr<torch::optim::Optimizer> make_plain_optimizer(
    const Case& fuzz_case, std::vector<torch::Tensor> parameters) {
  if (fuzz_case.options.optimizer == Optimizer::adamw) {
    return std::make_unique<torch::optim::AdamW>(
        std::move(parameters),
        torch::optim::AdamWOptions(kLearningRate).eps(kEpsilon));
  }
  return std::make_unique<torch::optim::SGD>(
      std::move(parameters), torch::optim::SGDOptions(kLearningRate));
}

torch::Tensor rebound(const torch::Tensor& gradient, int rank) {
  return torch::full_like(gradient, rank + 1);
}

struct Reference::Loss {
  torch::Tensor value;
  int wrapper;
  bool is_plain;
  bool averages;
  bool throws;
  std::set<size_t> trained;  // at the time of the forward
};

struct Reference::Replica {
  std::vector<torch::Tensor> tensors;
  std::vector<std::shared_ptr<Net>> nets;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::map<int, Loss> losses;
  std::vector<torch::Tensor> kept;
};

Reference::Reference(const Case& fuzz_case)
    : case_(fuzz_case),
      used_(fuzz_case.wrappers),
      sends_buffers_(fuzz_case.wrappers, true) {
  for (int rank = 0; rank < case_.world_size; ++rank) {
    auto& replica = *replicas_.emplace_back(std::make_unique<Replica>());
    replica.tensors = make_parameters(case_, 0);
    const auto own = make_parameters(case_, rank);
    for (size_t i = 0; i < own.size(); ++i) {
      torch::NoGradGuard no_grad;
      if (case_.parameters[i].is_ignored) replica.tensors[i].copy_(own[i]);
    }
    for (int wrapper = 0; wrapper < case_.wrappers; ++wrapper) {
      replica.nets.push_back(
          std::make_shared<Net>(case_, wrapper, replica.tensors));
    }
    replica.optimizer = make_plain_optimizer(case_, replica.tensors);
  }
}

Reference::~Reference() = default;

const std::vector<torch::Tensor>& Reference::parameters(int rank) const {
  return replicas_[rank]->tensors;
}

bool Reference::is_local(const Event& event, int rank) const {
  return !event.is_on_rank_zero_only || rank == 0;
}

void Reference::run(const Event& event) {
  switch (event.kind) {
    case EventKind::forward:
      return forward(event);
    case EventKind::backward:
      return backward(event);
    case EventKind::gradient:
      return;  // changes nothing
    case EventKind::zero_grad:
      for (auto& replica : replicas_) {
        replica->optimizer->zero_grad(event.sets_to_none);
      }
      gradients_are_known_ = true;
      return;
    case EventKind::keep_gradients:
      for (auto& replica : replicas_) {
        replica->kept.clear();
        for (auto& tensor : replica->tensors) {
          const auto& grad = tensor.grad();
          replica->kept.push_back(grad.defined() ? grad.clone() : grad);
        }
      }
      return;
    case EventKind::restore_gradients:
      for (auto& replica : replicas_) {
        for (size_t i = 0; i < replica->kept.size(); ++i) {
          replica->tensors[i].mutable_grad() = replica->kept[i];
        }
        replica->kept.clear();
      }
      return;
    case EventKind::hold_gradients:
      return;
    case EventKind::change_gradients:
      for (size_t rank = 0; rank < replicas_.size(); ++rank) {
        for (size_t i = 0; i < case_.parameters.size(); ++i) {
          auto& grad = replicas_[rank]->tensors[i].mutable_grad();
          if (!grad.defined() || case_.parameters[i].is_sparse) continue;
          grad = event.change == Change::rebound
                     ? rebound(grad, static_cast<int>(rank))
                     : torch::Tensor();
        }
      }
      return;
    case EventKind::round_trip:
      for (auto& replica : replicas_) round_trip(replica->nets);
      return;
    case EventKind::set_frozen:
      for (auto& replica : replicas_) {
        replica->tensors[event.parameter].set_requires_grad(!event.is_frozen);
      }
      return;
    case EventKind::wrap_again:
      return wrap_again(event.wrapper);
    case EventKind::step:
      if (case_.options.stepping == Stepping::in_backward) return;
      for (auto& replica : replicas_) replica->optimizer->step();
      return;
  }
}

void Reference::forward(const Event& event) {
  const bool averages =
      !event.is_plain && event.synchronises && !event.has_no_grad;
  if (!event.is_plain) {
    if (sends_buffers_[event.wrapper] && case_.options.broadcast_buffers) {
      torch::NoGradGuard no_grad;
      for (auto& replica : replicas_) {
        const auto source = replicas_[0]->nets[event.wrapper]->buffers();
        auto target = replica->nets[event.wrapper]->buffers();
        for (size_t i = 0; i < source.size(); ++i) target[i].copy_(source[i]);
      }
    }
    sends_buffers_[event.wrapper] = averages;
  }
  for (int rank = 0; rank < case_.world_size; ++rank) {
    if (!is_local(event, rank)) continue;
    auto& replica = *replicas_[rank];
    replica.losses.erase(event.slot);
    torch::AutoGradMode mode(!event.has_no_grad);
    const auto x = input_of(case_, event, rank);
    auto& net = *replica.nets[event.wrapper];
    std::vector<Output> outputs;
    try {
      outputs = net.run(x, {.rank = rank,
                            .step = event.use_step,
                            .exception = exception_on(event, rank)});
    } catch (const DeliberateError&) {
      continue;
    }
    if (event.has_no_grad) continue;
    Loss loss{.value = loss_of(case_, event, rank, x, outputs, net.auxiliary),
              .wrapper = event.wrapper,
              .is_plain = event.is_plain,
              .averages = averages,
              .throws = exception_on(event, rank) == Deliberate::in_backward,
              .trained = {}};
    for (size_t i : parameters_of(case_, event.wrapper)) {
      if (replica.tensors[i].requires_grad() &&
          !case_.parameters[i].is_ignored) {
        loss.trained.insert(i);
      }
    }
    if (event.keeps_penalty_apart) {
      auto penalty = loss;
      penalty.value = penalty_of(x, outputs);
      replica.losses.insert_or_assign(event.slot + kPenalties, penalty);
    }
    replica.losses.insert_or_assign(event.slot, std::move(loss));
  }
}

void Reference::backward(const Event& event) {
  // The parameters that each wrapper averages, and the wrappers through which
  // the graph passes.
  std::map<int, std::set<size_t>> averaged;
  std::set<int> involved;
  const auto count = case_.parameters.size();
  std::vector<std::vector<torch::Tensor>> before(count);
  std::vector<std::vector<torch::Tensor>> added(count);
  for (int rank = 0; rank < case_.world_size; ++rank) {
    auto& replica = *replicas_[rank];
    for (size_t i = 0; i < count; ++i) {
      before[i].push_back(replica.tensors[i].grad());
      replica.tensors[i].mutable_grad().reset();
    }
    torch::Tensor total;
    for (int slot : event.slots) {
      const auto found = replica.losses.find(slot);
      if (!is_local(event, rank) || found == replica.losses.end()) continue;
      const auto& loss = found->second;
      if (loss.throws) gradients_are_known_ = false;
      if (loss.averages) {
        averaged[loss.wrapper].insert(loss.trained.begin(), loss.trained.end());
      }
      if (!loss.is_plain) involved.insert(loss.wrapper);
      total = total.defined() ? total + loss.value : loss.value;
    }
    if (total.defined() && gradients_are_known_) {
      total.backward({}, event.retains_graph);
    }
    for (size_t i = 0; i < count; ++i) {
      auto& grad = replica.tensors[i].mutable_grad();
      added[i].push_back(grad);
      if (grad.defined()) {
        for (int wrapper : involved) used_[wrapper].emplace(i, rank);
      }
      if (before[i][rank].defined()) {
        grad = grad.defined() ? before[i][rank] + grad : before[i][rank];
      }
    }
  }
  if (!gradients_are_known_) {
    for (auto& parameters : used_) parameters.clear();
    return;
  }
  std::set<size_t> done;
  for (const auto& [wrapper, parameters] : averaged) {
    for (size_t i : parameters) {
      // A gradient that no rank used stays unchanged. A rank that has dropped
      // its gradient since has not used it.
      const auto uses =
          std::erase_if(used_[wrapper], [&, i = i](const auto& use) {
            return use.first == i &&
                   replicas_[use.second]->tensors[i].grad().defined();
          });
      std::erase_if(used_[wrapper],
                    [i = i](const auto& use) { return use.first == i; });
      if (uses == 0 || !done.insert(i).second) continue;
      average(i, before[i], added[i]);
      if (case_.options.stepping == Stepping::in_backward) step_in_backward(i);
    }
  }
}

void Reference::average(size_t parameter,
                        const std::vector<torch::Tensor>& before,
                        const std::vector<torch::Tensor>& added) {
  torch::Tensor sum;
  auto add = [&](const torch::Tensor& part) {
    if (!part.defined()) return;
    const auto dense = part.is_sparse() ? part.to_dense() : part;
    sum = sum.defined() ? sum + dense : dense.clone();
  };
  for (const auto& part : before) add(part);
  for (const auto& part : added) add(part);
  sum /= case_.world_size;
  for (auto& replica : replicas_) {
    replica->tensors[parameter].mutable_grad() = sum.clone();
  }
}

// The constructor gives rank 0's parameters to every rank.
void Reference::wrap_again(int wrapper) {
  torch::NoGradGuard no_grad;
  for (auto& replica : replicas_) {
    replica->losses.clear();
    for (size_t i : parameters_of(case_, wrapper)) {
      if (case_.parameters[i].is_ignored) continue;
      replica->tensors[i].copy_(replicas_[0]->tensors[i]);
    }
    replica->nets[wrapper] =
        std::make_shared<Net>(case_, wrapper, replica->tensors);
  }
  used_[wrapper].clear();
  sends_buffers_[wrapper] = true;
}

// SGD without state, because only that is drawn for optimizers in backward.
void Reference::step_in_backward(size_t parameter) {
  torch::NoGradGuard no_grad;
  for (auto& replica : replicas_) {
    auto& tensor = replica->tensors[parameter];
    if (!tensor.grad().defined()) continue;
    tensor.sub_(tensor.grad() * kLearningRate);
    tensor.mutable_grad().reset();
  }
}

}  // namespace lockstep::internal::fuzz
