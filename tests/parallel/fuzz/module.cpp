#include "tests/parallel/fuzz/module.h"

#include <cmath>

#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "tests/parallel/fuzz/operations.h"

namespace lockstep::internal::fuzz {
namespace {

torch::Tensor random_tensor(uint64_t seed, at::IntArrayRef sizes) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randn(sizes, generator, torch::kDouble);
}

// Returns the rows of the embedding that `x` selects.
torch::Tensor rows_for(const torch::Tensor& x, int64_t count) {
  return torch::arange(x.size(0), x.options().dtype(torch::kLong))
      .remainder(count);
}

}  // namespace

std::vector<torch::Tensor> make_parameters(const Case& fuzz_case, int rank,
                                           torch::Device device) {
  torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> tensors;
  for (size_t i = 0; i < fuzz_case.parameters.size(); ++i) {
    const auto& parameter = fuzz_case.parameters[i];
    auto value =
        random_tensor(fuzz_case.seed * 1000 + i, parameter.sizes).to(device);
    if (parameter.sizes.size() > 1) {
      value /= std::sqrt(static_cast<double>(fuzz_case.width));
    }
    value += 0.01 * rank;
    if (parameter.is_complex) value = torch::complex(value, value.flip({0}));
    if (parameter.layout == Layout::transposed && value.dim() > 1) {
      value = value.transpose(-2, -1).contiguous().transpose(-2, -1);
    } else if (parameter.layout == Layout::gapped && value.dim() > 0) {
      auto wide = parameter.sizes;
      wide.back() += 1;
      auto room = torch::zeros(wide, value.options())
                      .narrow(-1, 0, parameter.sizes.back());
      room.copy_(value);
      value = room;
    }
    tensors.push_back(value.detach().set_requires_grad(!parameter.is_frozen));
    if (parameter.has_hook && !parameter.is_frozen) {
      tensors.back().register_hook(
          [](const torch::Tensor& gradient) { return gradient * 2; });
    }
  }
  return tensors;
}

Net::Net(const Case& fuzz_case, int wrapper, std::vector<torch::Tensor> tensors)
    : case_(fuzz_case),
      ops_(ops_of(fuzz_case, wrapper)),
      tensors_(std::move(tensors)) {
  for (size_t i : parameters_of(fuzz_case, wrapper)) {
    const auto& parameter = fuzz_case.parameters[i];
    const auto name = "p" + std::to_string(i);
    if (parameter.is_sparse) {
      torch::nn::Embedding embedding(
          torch::nn::EmbeddingOptions(parameter.sizes[0], parameter.sizes[1])
              .sparse(true)
              ._weight(tensors_[i]));
      // LibTorch's Embedding itself registers the tensor given as `_weight`.
      embeddings_.emplace(i, register_module(name, embedding));
      continue;
    }
    register_parameter(name, tensors_[i], tensors_[i].requires_grad());
    if (parameter.is_registered_twice) {
      register_parameter(name + "_again", tensors_[i],
                         tensors_[i].requires_grad());
    }
  }
  for (const auto& op : fuzz_case.ops) {
    if (op.kind != OpKind::running_mean) continue;
    running_mean_ = register_buffer(
        "running_mean",
        torch::zeros({fuzz_case.width},
                     tensors_.front().options().dtype(torch::kDouble)));
    break;
  }
}

std::vector<Output> Net::run(const torch::Tensor& x, const Call& call) {
  auxiliary = torch::Tensor();
  std::vector<Output> outputs(1);
  auto now = x;
  for (size_t begin = 0; begin < ops_.size();) {
    size_t end = begin + 1;
    if (case_.ops[ops_[begin]].is_checkpointed) {
      while (end < ops_.size() && case_.ops[ops_[end]].is_checkpointed) ++end;
      now = checkpoint(
          CheckpointOptions{.early_stop = false},
          [this, begin, end, call](const torch::Tensor& part) {
            return run_range(begin, end, part, call, nullptr);
          },
          now);
    } else {
      now = run_range(begin, end, now, call, &outputs);
    }
    begin = end;
  }
  outputs[0].value = case_.modifies_result ? now * 1.0 : now;
  emitted.clear();
  for (const auto& output : outputs) emitted.push_back(output.op);
  return outputs;
}

torch::Tensor Net::run_range(size_t begin, size_t end, torch::Tensor x,
                             const Call& call, std::vector<Output>* outputs) {
  for (size_t i = begin; i < end; ++i) {
    const auto& op = case_.ops[ops_[i]];
    if (ops_[i] == case_.throwing_op) {
      if (call.exception == Deliberate::in_forward) throw DeliberateError();
      if (call.exception == Deliberate::in_backward) x = throw_in_backward(x);
    }
    if (!is_used(op.use, call.rank, call.step, case_.world_size)) continue;
    auto result = activate(op.activation, run_op(op, x));
    if (op.is_output && outputs != nullptr) {
      outputs->push_back({ops_[i], result});
    }
    if (!op.is_branch) x = result;
  }
  return x;
}

torch::Tensor Net::run_op(const Op& op, const torch::Tensor& x) {
  std::vector<torch::Tensor> parameters;
  for (size_t i : op.parameters) parameters.push_back(tensors_[i]);
  switch (op.kind) {
    case OpKind::embedding: {
      const auto rows = rows_for(x, parameters[0].size(0));
      const auto found = embeddings_.find(op.parameters[0]);
      if (found != embeddings_.end()) {
        return x + found->second->forward(rows);
      }
      return x + torch::embedding(parameters[0], rows);
    }
    case OpKind::running_mean: {
      torch::NoGradGuard no_grad;
      running_mean_.mul_(0.9).add_(x.detach().mean(0), 0.1);
      break;
    }
    case OpKind::auxiliary_loss:
      auxiliary = (x * parameters[0]).square().mean();
      return x;
    case OpKind::returned_parameter:
      return parameters[0];
    default:
      return compute(op.kind, x, parameters);
  }
  return x + running_mean_.clone();
}

torch::Tensor input_of(const Case& fuzz_case, const Event& event, int rank,
                       torch::Device device) {
  const auto seed =
      fuzz_case.seed * 1000003 +
      static_cast<uint64_t>(event.step * 100 + event.batch * 10 + rank) + 500;
  auto x = random_tensor(seed, {fuzz_case.rows, fuzz_case.width}).to(device);
  bool needs_grad = event.has_penalty;
  for (const auto& op : fuzz_case.ops) needs_grad |= op.is_checkpointed;
  return x.set_requires_grad(needs_grad);
}

torch::Tensor loss_of(const Case& fuzz_case, const Event& event, int rank,
                      const torch::Tensor& x,
                      const std::vector<Output>& outputs,
                      const torch::Tensor& auxiliary) {
  torch::Tensor loss;
  if (fuzz_case.modifies_result) {
    auto first = outputs[0].value;
    first.mul_(0.5).add_(0.1);
  }
  double weight = 1;
  for (const auto& [op, value] : outputs) {
    if (op != Output::kLast && !is_used(fuzz_case.ops[op].loss_use, rank,
                                        event.use_step, fuzz_case.world_size)) {
      continue;
    }
    // Bounded, so that training cannot diverge.
    const auto part = (value.tanh() - 0.3).square().mean() * weight;
    loss = loss.defined() ? loss + part : part;
    weight *= 0.5;
  }
  if (auxiliary.defined()) loss = loss + 0.1 * auxiliary.tanh();
  if (event.has_penalty && !event.keeps_penalty_apart) {
    loss = loss + penalty_of(x, outputs);
  }
  return loss;
}

torch::Tensor penalty_of(const torch::Tensor& x,
                         const std::vector<Output>& outputs) {
  const auto slope = torch::autograd::grad({outputs[0].value.square().sum()},
                                           {x}, {}, /*retain_graph=*/true,
                                           /*create_graph=*/true)[0];
  return 0.1 * slope.tanh().square().mean();
}

void round_trip(const std::vector<std::shared_ptr<Net>>& nets) {
  for (const auto& net : nets) net->to(torch::kFloat);
  for (const auto& net : nets) net->to(torch::kDouble);
}

}  // namespace lockstep::internal::fuzz
