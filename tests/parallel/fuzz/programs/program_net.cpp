#include "tests/parallel/fuzz/programs/program_net.h"

#include "lockstep/parallel/fsdp/fully_shard.h"

namespace lockstep::internal::fuzz {
namespace {

constexpr int64_t kRows = 5;  // of an embedding

// Values that float32 has, too.
torch::Tensor randn(at::IntArrayRef sizes) {
  return torch::randn(sizes, torch::kFloat).to(torch::kDouble);
}

uint64_t data_seed(const Program& program, int batch, int rank) {
  return program.seed * 1000 + static_cast<uint64_t>(batch * 10 + rank);
}

}  // namespace

LayerModule::LayerModule(const Layer& layer, int64_t width)
    : kind_(layer.kind) {
  const auto add = [&](const char* name, at::IntArrayRef sizes) {
    return register_parameter(name, 0.6 * randn(sizes));
  };
  switch (kind_) {
    case LayerKind::linear:
    case LayerKind::residual:
    case LayerKind::in_place:
    case LayerKind::recurrent:
      weight_ = add("weight", {width, width});
      bias_ = add("bias", {width});
      break;
    case LayerKind::norm:
      weight_ = add("weight", {width});
      bias_ = add("bias", {width});
      break;
    case LayerKind::twice:
      weight_ = add("weight", {width + 1, width});
      break;
    case LayerKind::embedding:
      weight_ = add("weight", {kRows, width});
      break;
    case LayerKind::penalty:
      weight_ = add("weight", {width});
      break;
  }
}

torch::Tensor LayerModule::forward(const torch::Tensor& x, const Batch& batch) {
  namespace F = torch::nn::functional;
  switch (kind_) {
    case LayerKind::residual:
      return x + 0.5 * F::linear(x, weight_, bias_).relu_();
    case LayerKind::norm:
      return torch::layer_norm(x, {x.size(1)}, weight_, bias_, 1e-3);
    case LayerKind::twice:
      return F::linear(torch::tanh(F::linear(x, weight_)), weight_.t());
    case LayerKind::embedding: {
      const auto rows = torch::arange(x.size(0)) * 3 + batch.number;
      return x + torch::embedding(weight_, rows % kRows);
    }
    case LayerKind::in_place: {
      torch::Tensor input = x;
      input.mul_(0.9);
      return torch::tanh(F::linear(input, weight_, bias_));
    }
    default:
      return torch::tanh(F::linear(x, weight_, bias_));
  }
}

torch::Tensor LayerModule::forward(const torch::Tensor& x,
                                   torch::Tensor& state) {
  const auto now =
      torch::tanh(torch::nn::functional::linear(x, weight_, bias_));
  state = state.defined() ? 0.5 * state + now : now;
  return x + state;
}

torch::Tensor LayerModule::forward(const torch::Tensor& x,
                                   std::vector<torch::Tensor>& losses) {
  const auto scaled = x * weight_;
  losses.push_back(scaled.square().mean());
  return scaled;
}

ProgramNet::ProgramNet(const Program& program, size_t begin, size_t end,
                       uint64_t values, at::ScalarType dtype,
                       const std::optional<FullyShardOptions>& units)
    : returns_view_(program.returns_view) {
  for (size_t i = begin; i < end; ++i) {
    const Layer& layer = program.layers[i];
    torch::manual_seed(values * 100 + i);
    auto module = std::make_shared<LayerModule>(layer, program.width);
    module->to(dtype);
    for (auto& parameter : module->parameters()) {
      parameter.set_requires_grad(!layer.is_frozen);
    }
    register_module("layer" + std::to_string(i), module);
    const auto add = [&](auto model) {
      steps_.push_back(
          {layer.is_skipped, layer.hooks_result,
           [model, kind = layer.kind](const auto& x, const auto& batch,
                                      auto& state, auto& losses) mutable {
             if (kind == LayerKind::recurrent) return model->forward(x, state);
             if (kind == LayerKind::penalty) return model->forward(x, losses);
             return model->forward(x, batch);
           }});
    };
    if (units && layer.is_unit) {
      add(FullyShard<LayerModule>(module, *units));
    } else {
      add(module);
    }
  }
}

torch::Tensor ProgramNet::run(torch::Tensor x, const Batch& batch,
                              torch::Tensor& state,
                              std::vector<torch::Tensor>& losses) {
  for (auto& step : steps_) {
    if (step.is_skipped && batch.number % 4 == 2) continue;
    x = step.forward(x, batch, state, losses);
    if (step.hooks_result && x.requires_grad()) {
      x.register_hook(
          [](const torch::Tensor& gradient) { return 0.5 * gradient; });
    }
  }
  return returns_view_ ? x.view({-1, x.size(1)}) : x;
}

torch::Tensor ProgramNet::forward(const torch::Tensor& x) {
  return forward(x, Batch());
}

torch::Tensor ProgramNet::forward(const torch::Tensor& x, const Batch& batch) {
  torch::Tensor state;
  std::vector<torch::Tensor> losses;
  return run(x, batch, state, losses);
}

torch::Tensor ProgramNet::forward(const torch::Tensor& x, const Batch& batch,
                                  torch::Tensor& state) {
  std::vector<torch::Tensor> losses;
  return run(x, batch, state, losses);
}

torch::Tensor ProgramNet::forward(const torch::Tensor& x, const Batch& batch,
                                  std::vector<torch::Tensor>& losses) {
  torch::Tensor state;
  return run(x, batch, state, losses);
}

torch::Tensor ProgramNet::forward(const torch::Tensor& x, const Batch& batch,
                                  std::optional<torch::Tensor>& cache) {
  torch::Tensor state = cache.value_or(torch::Tensor());
  std::vector<torch::Tensor> losses;
  const auto output = run(x, batch, state, losses);
  if (state.defined()) cache = state;
  return output;
}

torch::Tensor ProgramNet::forward(
    const torch::Tensor& x, const Batch& batch,
    std::pair<torch::Tensor, torch::Tensor>& both) {
  std::vector<torch::Tensor> losses;
  const auto output = run(x, batch, both.first, losses);
  for (const auto& loss : losses) {
    both.second = both.second.defined() ? both.second + loss : loss;
  }
  return output;
}

torch::Tensor loss_of_program(const Program& program, int batch, int rank,
                              const torch::Tensor& output,
                              const Variables& variables) {
  const auto target = target_of_program(program, batch, rank);
  auto loss = (output.to(torch::kDouble) - target).square().mean();
  for (const auto& one : variables.losses) loss = loss + 0.3 * one;
  if (variables.both.second.defined())
    loss = loss + 0.3 * variables.both.second;
  // The next state is trained, too.
  for (const auto& state : {variables.state, variables.both.first,
                            variables.cache.value_or(torch::Tensor())}) {
    if (state.defined()) loss = loss + 0.1 * state.to(torch::kDouble).mean();
  }
  return loss;
}

torch::Tensor input_of_program(const Program& program, int batch, int rank) {
  torch::manual_seed(data_seed(program, batch, rank));
  return randn({program.rows, program.width});
}

torch::Tensor target_of_program(const Program& program, int batch, int rank) {
  torch::manual_seed(data_seed(program, batch, rank) + 5);
  return randn({program.rows, program.width});
}

void begin_forward(Variables& variables) {
  const auto cut = [](torch::Tensor& tensor) {
    if (tensor.defined()) tensor = tensor.detach();
  };
  cut(variables.state);
  cut(variables.both.first);
  if (variables.cache) cut(*variables.cache);
  variables.losses.clear();
  variables.both.second = torch::Tensor();
}

}  // namespace lockstep::internal::fuzz
