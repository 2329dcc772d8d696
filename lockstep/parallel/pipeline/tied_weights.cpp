#include "lockstep/parallel/pipeline/tied_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/point_to_point.h"
#include "lockstep/parallel/fsdp/flat_parameters.h"

namespace lockstep::internal {
namespace {

at::Tensor named_parameter(const PipelineStage& stage,
                           const std::string& name) {
  const auto parameters = stage.module().named_parameters();
  const at::Tensor* found = parameters.find(name);
  if (found != nullptr && unit_of(*found) != nullptr) {
    throw std::invalid_argument(c10::str(
        "parameter \"", name, "\" of stage ", stage.index(),
        ", which a tied weight names, is divided by a FullyShard; make the "
        "stages that hold it of a DistributedDataParallel"));
  }
  if (found != nullptr) return *found;
  throw std::invalid_argument(c10::str("stage ", stage.index(),
                                       " has no parameter \"", name,
                                       "\", which a tied weight names"));
}

bool is_one_of(const at::Tensor& tensor,
               const std::vector<at::Tensor>& tensors) {
  return std::ranges::any_of(
      tensors, [&](const at::Tensor& other) { return other.is_same(tensor); });
}

}  // namespace

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
        const at::Tensor parameter = named_parameter(stage, holder.parameter);
        if (is_one_of(parameter, weight.mine)) continue;
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

std::vector<std::string> TiedWeights::shapes() const {
  std::vector<std::string> shapes;
  for (const Weight& weight : weights_) {
    shapes.push_back(weight.mine.empty()
                         ? ""
                         : c10::str(weight.mine.front().sizes(),
                                    weight.mine.front().scalar_type()));
  }
  return shapes;
}

void TiedWeights::share_values() {
  const at::NoGradGuard no_grad;
  for (const Weight& weight : weights_) {
    if (weight.mine.empty()) continue;
    const at::Tensor& first = weight.mine.front();
    if (weight.ranks.front() == group_->rank()) {
      for (size_t i = 1; i < weight.ranks.size(); ++i) {
        send(first.contiguous(), group_->global_rank(weight.ranks[i]),
             {.group = group_});
      }
    } else {
      at::Tensor values = at::empty_like(first, at::MemoryFormat::Contiguous);
      recv(values, group_->global_rank(weight.ranks.front()),
           {.group = group_});
      at::Tensor target = first;
      target.copy_(values);
    }
    for (size_t i = 1; i < weight.mine.size(); ++i) {
      at::Tensor target = weight.mine[i];
      target.copy_(first);
    }
  }
}

bool TiedWeights::is_duplicate(const at::Tensor& parameter) const {
  return std::ranges::any_of(weights_, [&](const Weight& weight) {
    if (!is_one_of(parameter, weight.mine)) return false;
    return weight.ranks.front() != group_->rank() ||
           !weight.mine.front().is_same(parameter);
  });
}

void TiedWeights::begin_step() {
  for (Weight& weight : weights_) {
    weight.earlier.clear();
    for (at::Tensor& parameter : weight.mine) {
      weight.earlier.push_back(std::exchange(parameter.mutable_grad(), {}));
    }
  }
}

void TiedWeights::sum_gradients() {
  const at::NoGradGuard no_grad;
  for (Weight& weight : weights_) {
    if (weight.mine.empty()) continue;
    at::Tensor own =
        at::zeros_like(weight.mine.front(), at::MemoryFormat::Contiguous);
    for (const at::Tensor& parameter : weight.mine) {
      if (parameter.grad().defined()) own += parameter.grad();
    }
    std::vector<WorkPtr> works;
    std::vector<at::Tensor> parts;
    for (const int rank : weight.ranks) {
      if (rank == group_->rank()) {
        parts.push_back(own);
        continue;
      }
      parts.push_back(at::empty_like(own));
      const int peer = group_->global_rank(rank);
      works.push_back(irecv(parts.back(), peer, {.group = group_}));
      works.push_back(isend(own, peer, {.group = group_}));
    }
    for (const WorkPtr& work : works) work->wait();
    at::Tensor sum = parts.front();
    for (size_t i = 1; i < parts.size(); ++i) sum = sum + parts[i];
    for (size_t i = 0; i < weight.mine.size(); ++i) {
      const at::Tensor& earlier = weight.earlier[i];
      weight.mine[i].mutable_grad() =
          earlier.defined() ? sum + earlier : sum.clone();
    }
    weight.earlier.clear();
  }
}

}  // namespace lockstep::internal
