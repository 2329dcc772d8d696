#include "tests/parallel/fuzz/programs/program_reference.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace lockstep::internal::fuzz {
namespace {

std::unique_ptr<torch::optim::OptimizerOptions> options_of_group(
    const Program& program, int group) {
  const double rate = group == 2 ? kProgramRate / 2 : kProgramRate;
  const double decay = group == 1 ? 0 : kProgramDecay;
  if (program.stepper == Stepper::adamw) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(rate).weight_decay(decay).eps(
            kProgramEpsilon));
  }
  const double momentum =
      program.stepper == Stepper::momentum ? kProgramMomentum : 0;
  return std::make_unique<torch::optim::SGDOptions>(
      torch::optim::SGDOptions(rate).weight_decay(decay).momentum(momentum));
}

size_t layer_of_parameter(const std::string& name) {
  return std::stoul(name.substr(std::string("layer").size()));
}

void add(at::Tensor& to, const at::Tensor& gradient) {
  if (gradient.defined()) to = to.defined() ? to + gradient : gradient;
}

}  // namespace

int group_of_parameter(const Program& program, const std::string& name) {
  return program.layers.at(layer_of_parameter(name)).group;
}

ProgramReference::ProgramReference(const Program& program)
    : program_(program),
      net_(std::make_shared<ProgramNet>(program, 0, program.layers.size(),
                                        program.seed, at::kDouble)),
      variables_(static_cast<size_t>(data_ranks(program))),
      seen_(variables_.size()),
      pending_(variables_.size()) {
  if (program.precision == Precision::bfloat16) {
    rounded_ = std::make_shared<ProgramNet>(program, 0, program.layers.size(),
                                            program.seed, at::kBFloat16);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (int group = 0; group < kGroups; ++group) {
    std::vector<at::Tensor> parameters;
    for (const auto& item : net_->named_parameters()) {
      if (group_of_parameter(program, item.key()) == group) {
        parameters.push_back(item.value());
      }
    }
    groups.emplace_back(parameters);
  }
  if (program.stepper == Stepper::adamw) {
    optimizer_ = std::make_unique<torch::optim::AdamW>(groups);
  } else {
    optimizer_ = std::make_unique<torch::optim::SGD>(groups, kProgramRate);
  }
  // LibTorch's constructors change options that look as if they were not set.
  for (int group = 0; group < kGroups; ++group) {
    optimizer_->param_groups()[static_cast<size_t>(group)].set_options(
        options_of_group(program, group));
  }
}

at::Tensor ProgramReference::parameter(const std::string& name) const {
  return net_->named_parameters()[name].detach();
}

at::Tensor ProgramReference::gradient(const std::string& name) const {
  const auto found = averaged_.find(name);
  return found == averaged_.end() ? at::Tensor() : found->second;
}

void ProgramReference::run(const Action& action) {
  if (variables_before_) variables_ = *std::exchange(variables_before_, {});
  switch (action.kind) {
    case ActionKind::zero_grad: {
      // An optimizer does not see what FullyShard keeps under no_sync().
      const bool drops_pending = program_.wrapping != Wrapping::fully_shard ||
                                 action.idiom == Idiom::arrow;
      for (const auto& item : net_->named_parameters()) {
        bool is_there = averaged_[item.key()].defined();
        for (auto& of_rank : pending_) {
          is_there |= drops_pending && of_rank[item.key()].defined();
        }
        averaged_[item.key()] = is_there && !action.sets_to_none
                                    ? torch::zeros_like(item.value().detach())
                                    : at::Tensor();
      }
      averaged_.magnitude = 0;
      if (drops_pending) pending_.assign(pending_.size(), {});
      return;
    }
    case ActionKind::train:
      return train(action);
    case ActionKind::step:
      return step();
    case ActionKind::clip:
      return clip();
    case ActionKind::set_rate:
      for (auto& group : optimizer_->param_groups()) {
        group.options().set_lr(group.options().get_lr() / 2);
      }
      return;
    case ActionKind::evaluate: {
      const at::NoGradGuard no_grad;
      variables_before_ = variables_;
      for (int rank = 0; rank < data_ranks(program_); ++rank) {
        forward(action, action.batch, rank);
      }
      return;
    }
    case ActionKind::set_frozen:
      for (const auto& item : net_->named_parameters()) {
        if (layer_of_parameter(item.key()) == action.layer) {
          item.value().set_requires_grad(!action.is_frozen);
        }
      }
      return;
    case ActionKind::keep_gradients:
      kept_ = averaged_;
      return;
    case ActionKind::use_kept:
      for (const auto& [name, gradient] : kept_) {
        add(averaged_[name], gradient);
      }
      averaged_.magnitude += kept_.magnitude;
      return;
    case ActionKind::joined:
      return join(action);
    case ActionKind::rebind:
    case ActionKind::reload:
      return;
  }
}

// Returns the net that computes forward and backward.
std::shared_ptr<ProgramNet>& ProgramReference::computing_net() {
  if (!rounded_) return net_;
  const at::NoGradGuard no_grad;
  auto rounded = rounded_->parameters();
  const auto exact = net_->parameters();
  for (size_t i = 0; i < exact.size(); ++i) {
    rounded[i].copy_(exact[i]).set_requires_grad(exact[i].requires_grad());
  }
  return rounded_;
}

at::Tensor ProgramReference::forward(const Action& action, int batch,
                                     int rank) {
  auto& seen = seen_[static_cast<size_t>(rank)];
  auto& variables = variables_[static_cast<size_t>(rank)];
  variables.losses.clear();
  variables.both.second = at::Tensor();
  seen.input = input_of_program(program_, batch, rank);
  if (rounded_) seen.input = seen.input.to(at::kBFloat16);
  seen.output = call_model(computing_net(), action.idiom, program_.argument,
                           seen.input, Batch{batch}, variables);
  if (action.modifies_result) seen.output.mul_(0.5);
  const auto loss =
      loss_of_program(program_, batch, rank, seen.output, variables);
  seen.loss = loss.item<double>();
  return loss;
}

void ProgramReference::add_gradients(const at::Tensor& loss,
                                     Gradients& gradients) {
  std::vector<std::string> names;
  std::vector<at::Tensor> trained;
  const auto& net = rounded_ ? rounded_ : net_;
  for (const auto& item : net->named_parameters()) {
    if (!item.value().requires_grad()) continue;
    names.push_back(item.key());
    trained.push_back(item.value());
  }
  const auto found = torch::autograd::grad({loss}, trained, {}, false, false,
                                           /*allow_unused=*/true);
  double squares = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!found[i].defined()) continue;
    const auto& layer = program_.layers[layer_of_parameter(names[i])];
    const auto gradient = found[i].to(at::kDouble) * (layer.has_hook ? 2 : 1);
    add(gradients[names[i]], gradient);
    squares += gradient.square().sum().item<double>();
  }
  gradients.magnitude += std::sqrt(squares);
}

void ProgramReference::train(const Action& action) {
  for (int rank = 0; rank < data_ranks(program_); ++rank) {
    begin_forward(variables_[static_cast<size_t>(rank)]);
    auto loss = forward(action, action.batch, rank);
    if (action.has_two_forwards) {
      loss = loss + forward(action, action.batch + 1, rank);
    }
    add_gradients(loss, pending_[static_cast<size_t>(rank)]);
  }
  if (action.synchronises) average();
}

void ProgramReference::average() {
  for (auto& of_rank : pending_) {
    for (auto& [name, gradient] : of_rank) {
      if (gradient.defined()) {
        add(averaged_[name],
            gradient / static_cast<double>(data_ranks(program_)));
      }
    }
    averaged_.magnitude +=
        of_rank.magnitude / static_cast<double>(data_ranks(program_));
    of_rank = {};
  }
}

void ProgramReference::join(const Action& action) {
  const int longest = *std::ranges::max_element(action.inputs);
  for (int i = 0; i < longest; ++i) {
    averaged_ = {};
    for (int rank = 0; rank < data_ranks(program_); ++rank) {
      if (action.inputs[static_cast<size_t>(rank)] <= i) continue;
      begin_forward(variables_[static_cast<size_t>(rank)]);
      add_gradients(forward(action, action.batch + i, rank),
                    pending_[static_cast<size_t>(rank)]);
    }
    average();
    step();
  }
}

void ProgramReference::step() {
  for (const auto& item : net_->named_parameters()) {
    at::Tensor parameter = item.value();
    parameter.mutable_grad() = gradient(item.key());
  }
  optimizer_->step();
  reach_ = kProgramRate * averaged_.magnitude;
}

void ProgramReference::clip() {
  double squares = 0;
  for (const auto& [name, gradient] : averaged_) {
    if (gradient.defined()) squares += gradient.square().sum().item<double>();
  }
  norm_ = std::sqrt(squares);
  const double factor = std::min(1.0, kProgramMaxNorm / (norm_ + 1e-6));
  for (auto& [name, gradient] : averaged_) {
    if (gradient.defined()) gradient = gradient * factor;
  }
  // The factor is as far off as the norm, by as much as the gradients.
  averaged_.magnitude *= 2 * factor;
}

}  // namespace lockstep::internal::fuzz
