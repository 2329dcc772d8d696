#include "lockstep/parallel/pipeline/tied_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/point_to_point.h"
#include "lockstep/comm/version_of.h"
#include "lockstep/parallel/fsdp/flat_parameters.h"

namespace lockstep::internal {
namespace {

// Finds what the module registered, and the flat tensor that it is in, if it
// is divided.
TiedWeights::Holder holder_of(const PipelineStage& stage,
                              const std::string& name) {
  const auto parameters = stage.module().named_parameters();
  const at::Tensor* found = parameters.find(name);
  if (found == nullptr) {
    throw std::invalid_argument(c10::str("stage ", stage.index(),
                                         " has no parameter \"", name,
                                         "\", which a tied weight names"));
  }
  TiedWeights::Holder holder{
      .stage = stage.index(), .name = name, .registered = *found};
  holder.unit = unit_of(*found);
  if (holder.unit == nullptr) return holder;
  for (const auto& flat : holder.unit->flats()) {
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      if (!flat->parameters()[i].shard.is_same(*found)) continue;
      holder.flat = flat.get();
      holder.index = i;
    }
  }
  return holder;
}

bool is_one_of(const at::Tensor& tensor,
               const std::vector<TiedWeights::Holder>& holders) {
  return std::ranges::any_of(holders, [&](const auto& other) {
    return other.registered.is_same(tensor);
  });
}

}  // namespace

at::IntArrayRef TiedWeights::Holder::sizes() const {
  return flat == nullptr ? registered.sizes()
                         : flat->parameters()[index].compute.sizes();
}

at::ScalarType TiedWeights::Holder::gradient_dtype() const {
  return flat == nullptr ? registered.scalar_type() : flat->reduce_dtype();
}

at::Tensor& TiedWeights::Holder::gradient() const {
  return flat == nullptr ? registered.mutable_grad()
                         : flat->full_gradient(index);
}

at::Tensor TiedWeights::Holder::values() const {
  if (flat == nullptr) return registered.detach().contiguous();
  // In the dtype of the shards, which a gather would not keep.
  const auto& [from, to] = flat->parameters()[index].range;
  at::Tensor whole = at::zeros(flat->parameters()[index].compute.numel(),
                               registered.options().requires_grad(false));
  whole.slice(0, from, to).copy_(registered.view({-1}));
  all_reduce(whole, {.group = unit->options().group});
  return whole.view(sizes());
}

void TiedWeights::Holder::set_values(const at::Tensor& values) const {
  at::Tensor target = registered;
  if (flat == nullptr) {
    target.copy_(values);
    return;
  }
  const auto& [from, to] = flat->parameters()[index].range;
  target.copy_(values.view({-1}).slice(0, from, to).view_as(target));
}

TiedWeights::TiedWeights(const std::vector<TiedWeight>& weights,
                         const std::vector<PipelineStage>& stages,
                         const std::vector<int>& rank_of_stage,
                         ProcessGroupPtr group)
    : group_(std::move(group)) {
  for (const TiedWeight& given : weights) {
    if (given.holders.size() < 2) {
      throw std::invalid_argument(c10::str("a tied weight has ",
                                           given.holders.size(),
                                           " holders; name at least 2 stages"));
    }
    Weight& weight = weights_.emplace_back();
    weight.name = c10::str("stage ", given.holders.front().stage, " ",
                           given.holders.front().parameter);
    for (const TiedWeight::Holder& holder : given.holders) {
      if (holder.stage < 0 ||
          holder.stage >= static_cast<int>(rank_of_stage.size())) {
        throw std::invalid_argument(
            c10::str("a tied weight names stage ", holder.stage,
                     ", but the schedule has ", rank_of_stage.size()));
      }
      const int rank = rank_of_stage[static_cast<size_t>(holder.stage)];
      if (!std::ranges::count(weight.ranks, rank)) weight.ranks.push_back(rank);
      for (const PipelineStage& stage : stages) {
        if (stage.index() != holder.stage) continue;
        const Holder parameter = holder_of(stage, holder.parameter);
        if (is_one_of(parameter.registered, weight.mine)) continue;
        if (!weight.mine.empty() &&
            weight.mine.front().sizes() != parameter.sizes()) {
          throw std::invalid_argument(c10::str(
              "\"", holder.parameter, "\" of stage ", holder.stage,
              " has the shape ", parameter.sizes(), ", but it is tied to one ",
              "of shape ", weight.mine.front().sizes()));
        }
        weight.mine.push_back(parameter);
      }
    }
  }
}

std::vector<int64_t> TiedWeights::trained() const {
  std::vector<int64_t> trained;
  for (const Weight& weight : weights_) {
    const auto count = std::ranges::count_if(
        weight.mine,
        [](const Holder& one) { return one.registered.requires_grad(); });
    trained.push_back(weight.mine.empty()                ? -1
                      : count == 0                       ? 0
                      : count == std::ssize(weight.mine) ? 1
                                                         : 2);
  }
  return trained;
}

std::vector<std::string> TiedWeights::shapes() const {
  std::vector<std::string> shapes;
  for (const Weight& weight : weights_) {
    if (weight.mine.empty()) {
      shapes.emplace_back();
      continue;
    }
    const Holder& first = weight.mine.front();
    const auto dtype = first.registered.scalar_type();
    shapes.push_back(c10::str(first.sizes(), dtype));
    if (first.gradient_dtype() != dtype) {
      shapes.back() += c10::str(" with gradients ", first.gradient_dtype());
    }
  }
  return shapes;
}

void TiedWeights::share_values() {
  const at::NoGradGuard no_grad;
  for (const Weight& weight : weights_) {
    if (weight.mine.empty()) continue;
    const bool has_first = weight.ranks.front() == group_->rank();
    at::Tensor values =
        has_first
            ? weight.mine.front().values()
            : at::empty(weight.mine.front().sizes(),
                        weight.mine.front().registered.options().requires_grad(
                            false));
    if (has_first) {
      for (size_t i = 1; i < weight.ranks.size(); ++i) {
        send(values, group_->global_rank(weight.ranks[i]), {.group = group_});
      }
    } else {
      recv(values, group_->global_rank(weight.ranks.front()),
           {.group = group_});
    }
    for (const Holder& holder : weight.mine) holder.set_values(values);
  }
}

bool TiedWeights::is_duplicate(const at::Tensor& parameter) const {
  return std::ranges::any_of(weights_, [&](const Weight& weight) {
    if (!is_one_of(parameter, weight.mine)) return false;
    return weight.ranks.front() != group_->rank() ||
           !weight.mine.front().registered.is_same(parameter);
  });
}

std::string TiedWeights::name_of(const at::Tensor& parameter) const {
  for (const Weight& weight : weights_) {
    if (is_one_of(parameter, weight.mine)) return weight.name;
  }
  return {};
}

void TiedWeights::begin(bool training) {
  for (Weight& weight : weights_) {
    weight.versions.clear();
    weight.earlier.clear();
    for (const Holder& holder : weight.mine) {
      weight.versions.push_back(version_of(holder.registered));
      if (!training || !weight.trains()) continue;
      weight.earlier.push_back(std::exchange(holder.gradient(), {}));
    }
  }
}

void TiedWeights::require_unwritten() const {
  for (const Weight& weight : weights_) {
    for (size_t i = 0; i < weight.mine.size(); ++i) {
      const Holder& holder = weight.mine[i];
      if (version_of(holder.registered) == weight.versions[i]) continue;
      throw std::logic_error(c10::str(
          "Pipeline: forward of stage ", holder.stage,
          " has written parameter \"", holder.name,
          "\", a tied weight, of which other stages have copies that are not "
          "written; write all copies alike after step(), or before the "
          "pipeline is made"));
    }
  }
}

void TiedWeights::finish(bool training) {
  require_unwritten();
  if (!training) return;
  const at::NoGradGuard no_grad;
  for (Weight& weight : weights_) {
    if (!weight.trains()) continue;
    const Holder& first = weight.mine.front();
    const int64_t count = c10::multiply_integers(first.sizes());
    // The last element tells how many ranks have used the weight.
    at::Tensor own = at::zeros(
        {count + 1}, first.registered.options().requires_grad(false).dtype(
                         first.gradient_dtype()));
    for (const Holder& holder : weight.mine) {
      const at::Tensor& gradient = holder.gradient();
      if (!gradient.defined()) continue;
      own.narrow(0, 0, count).view(first.sizes()).add_(gradient);
      own.narrow(0, count, 1).fill_(1);
    }
    std::vector<P2POp> messages;
    std::vector<at::Tensor> parts;
    for (const int rank : weight.ranks) {
      if (rank == group_->rank()) {
        parts.push_back(own);
        continue;
      }
      parts.push_back(at::empty_like(own));
      const int peer = group_->global_rank(rank);
      messages.push_back(
          {P2POp::Kind::irecv, parts.back(), peer, group_, /*tag=*/0});
      messages.push_back({P2POp::Kind::isend, own, peer, group_, /*tag=*/0});
    }
    if (!messages.empty()) {
      for (const WorkPtr& work : batch_isend_irecv(messages)) work->wait();
    }
    at::Tensor sum = parts.front();
    for (size_t i = 1; i < parts.size(); ++i) sum = sum + parts[i];
    const bool is_used = sum.narrow(0, count, 1).item<double>() > 0;
    sum = sum.narrow(0, 0, count).view(first.sizes());
    for (size_t i = 0; i < weight.mine.size(); ++i) {
      const at::Tensor& earlier = weight.earlier[i];
      weight.mine[i].gradient() = !is_used            ? earlier
                                  : earlier.defined() ? sum + earlier
                                                      : sum.clone();
    }
    weight.earlier.clear();
  }
}

}  // namespace lockstep::internal
