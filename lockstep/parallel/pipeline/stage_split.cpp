#include "lockstep/parallel/pipeline/stage_split.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <stdexcept>

#include "lockstep/checkpoint/loop_state.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/worker/healing_place.h"

namespace lockstep {

torch::nn::Sequential stage_of(const torch::nn::Sequential& whole,
                               const std::vector<int64_t>& begins, int stage) {
  const auto count = static_cast<int64_t>(whole->size());
  bool is_right =
      !begins.empty() && begins.front() == 0 && begins.back() < count &&
      std::ranges::adjacent_find(begins, std::greater_equal()) == begins.end();
  if (!is_right) {
    throw std::invalid_argument(c10::str(
        "stages of a Sequential with ", count, " children cannot begin at ",
        at::IntArrayRef(begins), "; give ascending numbers from 0 on"));
  }
  if (stage < 0 || stage >= static_cast<int>(begins.size())) {
    throw std::invalid_argument(
        c10::str("there is no stage ", stage, " of ", begins.size()));
  }
  const auto at = static_cast<size_t>(stage);
  const int64_t end = at + 1 < begins.size() ? begins[at + 1] : count;
  const auto children = whole->named_children();
  torch::nn::Sequential part;
  for (int64_t i = begins[at]; i < end; ++i) {
    const auto k = static_cast<size_t>(i);
    part->push_back(children[k].key(), *(whole->begin() + i));
  }
  return part;
}

std::vector<int64_t> balanced_begins(const std::vector<double>& costs,
                                     int stages) {
  const auto count = static_cast<int64_t>(costs.size());
  if (stages < 1 || count < stages) {
    throw std::invalid_argument(c10::str(count, " children cannot be divided ",
                                         "into ", stages, " stages"));
  }
  // best[s][i]: the dearest stage if the first i children are s stages.
  const double never = std::numeric_limits<double>::infinity();
  const auto n = static_cast<size_t>(count);
  const auto s = static_cast<size_t>(stages);
  std::vector best(s + 1, std::vector<double>(n + 1, never));
  std::vector last(s + 1, std::vector<size_t>(n + 1, 0));
  best[0][0] = 0;
  for (size_t stage = 1; stage <= s; ++stage) {
    for (size_t end = stage; end <= n; ++end) {
      double sum = 0;
      for (size_t begin = end; begin-- > stage - 1;) {
        sum += costs[begin];
        const double dearest = std::max(sum, best[stage - 1][begin]);
        if (dearest < best[stage][end]) {
          best[stage][end] = dearest;
          last[stage][end] = begin;
        }
      }
    }
  }
  std::vector<int64_t> begins(s);
  size_t end = n;
  for (size_t stage = s; stage > 0; --stage) {
    end = last[stage][end];
    begins[stage - 1] = static_cast<int64_t>(end);
  }
  return begins;
}

std::vector<double> measured_costs(const torch::nn::Sequential& whole,
                                   const at::Tensor& input) {
  const at::AutoGradMode grad_mode(true);
  torch::nn::Sequential model = whole;  // the same one, not const
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& buffer : model->buffers()) {
    buffers.push_back(buffer.clone());
  }
  const at::Tensor generators = internal::generator_state(model.get());
  std::vector<double> costs(whole->size(),
                            std::numeric_limits<double>::infinity());
  for (int repetition = 0; repetition < 3; ++repetition) {
    at::Tensor next = input.detach();
    size_t k = 0;
    for (auto& child : *model) {
      at::Tensor given = next.detach();
      if (given.is_floating_point()) given.requires_grad_();
      const auto begin = std::chrono::steady_clock::now();
      next = child.forward(given);
      if (next.requires_grad()) next.sum().backward();
      const std::chrono::duration<double> took =
          std::chrono::steady_clock::now() - begin;
      costs[k] = std::min(costs[k], took.count());
      ++k;
    }
  }
  model->zero_grad();
  internal::set_generator_state(generators, model.get());
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> now = model->buffers();
  for (size_t i = 0; i < now.size(); ++i) {
    at::Tensor buffer = now[i];
    buffer.copy_(buffers[i]);
  }
  return costs;
}

std::vector<int64_t> balanced_begins(const torch::nn::Sequential& whole,
                                     const at::Tensor& input, int stages,
                                     const ProcessGroupPtr& group) {
  const auto ranks = internal::group_or_default(group);
  if (internal::job_heals() && ranks->size() > 1) {
    throw std::invalid_argument(
        "balanced_begins: the job heals, and a process that takes the place of "
        "a rank that died cannot measure as the first one did, so its stages "
        "could be others; measure once with measured_costs(), and give the "
        "numbers to balanced_begins(costs, stages)");
  }
  if (stages < 1 || whole->size() < static_cast<size_t>(stages)) {
    throw std::invalid_argument(c10::str(whole->size(), " children cannot be ",
                                         "divided into ", stages, " stages"));
  }
  const auto device = ranks->control_device();
  at::Tensor begins = at::zeros({stages}, at::kLong);
  if (ranks->rank() == 0) {
    begins = at::tensor(balanced_begins(measured_costs(whole, input), stages),
                        at::kLong);
  }
  begins = begins.to(device);
  broadcast(begins, ranks->global_rank(0), {.group = ranks});
  begins = begins.to(at::kCPU);
  const int64_t* first = begins.data_ptr<int64_t>();
  return {first, first + stages};
}

}  // namespace lockstep
