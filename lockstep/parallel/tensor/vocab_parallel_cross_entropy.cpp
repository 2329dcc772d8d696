#include "lockstep/parallel/tensor/vocab_parallel_cross_entropy.h"

#include <ATen/OpMathType.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>
#include <variant>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/tensor/tensor_part.h"

namespace lockstep::internal {
namespace {

using nn::VocabParallelCrossEntropyOptions;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool is_mean(const VocabParallelCrossEntropyOptions& options) {
  return std::holds_alternative<torch::enumtype::kMean>(options.reduction);
}
bool is_sum(const VocabParallelCrossEntropyOptions& options) {
  return std::holds_alternative<torch::enumtype::kSum>(options.reduction);
}

void check_loss_arguments(const at::Tensor& logits, const at::Tensor& target,
                          const VocabParallelCrossEntropyOptions& options) {
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1)) {
    throw std::invalid_argument(
        c10::str("vocab_parallel_cross_entropy: label_smoothing is ",
                 options.label_smoothing, "; allowed are 0 to 1"));
  }
  if (!at::isFloatingType(logits.scalar_type()) ||
      target.scalar_type() != at::kLong) {
    throw std::invalid_argument(
        c10::str("vocab_parallel_cross_entropy: logits are ",
                 logits.scalar_type(), " and target ", target.scalar_type(),
                 "; give floating-point logits and target as Long"));
  }
  if (logits.dim() == 0 ||
      logits.sizes().slice(0, logits.dim() - 1) != target.sizes()) {
    throw std::invalid_argument(
        c10::str("vocab_parallel_cross_entropy: logits have the shape ",
                 logits.sizes(), ", target ", target.sizes(),
                 "; target must have the shape of logits without the last "
                 "dimension, that of the classes"));
  }
}

// Checks the sums over the ranks of `own` and of rank * `own`. Of all divisions
// of `all` classes with at most `each` on a rank, that of torch.chunk() has the
// least second sum, and no other one has it.
void check_classes(int64_t own, int64_t each, int64_t all, int64_t moment,
                   const ProcessGroupPtr& group) {
  int64_t chunked = 0;
  for (int rank = 0; rank < group->size(); ++rank) {
    chunked += rank * std::clamp<int64_t>(all - rank * each, 0, each);
  }
  if (moment == chunked && (all + group->size() - 1) / group->size() == each) {
    return;
  }
  throw std::invalid_argument(c10::str(
      "vocab_parallel_cross_entropy: this rank's logits have ", own,
      " classes of ", all, " on ", group->size(),
      " ranks, and the ranks' numbers are not those that torch.chunk() gives; "
      "divide them as ColumnParallelLinear does"));
}

void check_targets(const at::Tensor& target, const at::Tensor& valid,
                   int64_t classes) {
  if (target.numel() == 0) return;
  auto [least, greatest] = at::aminmax(target.masked_fill(~valid, 0));
  const auto first = least.item<int64_t>();
  const auto last = greatest.item<int64_t>();
  if (first >= 0 && last < classes) return;
  throw std::invalid_argument(
      c10::str("vocab_parallel_cross_entropy: target has the class ",
               first < 0 ? first : last, "; allowed are 0 to ", classes - 1,
               " and ignore_index"));
}

struct LossCall : torch::CustomClassHolder {
  LossCall(VocabParallelCrossEntropyOptions given, ProcessGroupPtr ranks)
      : options(std::move(given)), group(std::move(ranks)) {}
  VocabParallelCrossEntropyOptions options;
  ProcessGroupPtr group;
  int64_t classes = 0;
};
using LossCallPtr = c10::intrusive_ptr<LossCall>;

// All tensors below are flat over the N targets; logits are [N, own classes].
class VocabParallelCrossEntropy
    : public torch::autograd::Function<VocabParallelCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given,
                            const at::Tensor& target, const LossCallPtr& call) {
    const auto& options = call->options;
    const bool smooth = options.label_smoothing > 0;
    auto logits = given.to(at::toOpMathType(given.scalar_type()));
    const int64_t count = logits.size(0);
    const int64_t own = logits.size(1);

    // The greatest logit of each target, and the greatest number of classes.
    auto most = at::full({count + 1}, -std::numeric_limits<double>::infinity(),
                         logits.options().dtype(at::kDouble));
    auto greatest = most.narrow(0, 0, count);
    if (own > 0) greatest.copy_(logits.amax(-1));
    most[count] = own;
    all_reduce(most, {.op = ReduceOp::MAX, .group = call->group});
    const auto each = most[count].item<int64_t>();

    // Sums over all classes: of exp(logit), of the target's logit, of all
    // logits; and what check_classes() needs.
    const int64_t first = call->group->rank() * each;
    auto shifted = logits - greatest.to(logits.scalar_type()).unsqueeze(-1);
    auto here = target.ge(first).logical_and_(target.lt(first + own));
    auto local = (target - first).masked_fill_(here.logical_not(), 0);
    const int64_t rows = smooth ? 3 : 2;
    auto sums =
        at::zeros({rows * count + 2}, logits.options().dtype(at::kDouble));
    auto row = [&](int64_t index) {
      return sums.narrow(0, index * count, count);
    };
    if (own > 0) {
      row(1)
          .copy_(shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1))
          .masked_fill_(here.logical_not(), 0);
      if (smooth) row(2).copy_(shifted.sum(-1));
    }
    auto probabilities = shifted.exp_();
    row(0).copy_(probabilities.sum(-1));
    sums[rows * count] = own;
    sums[rows * count + 1] = call->group->rank() * own;
    all_reduce(sums, {.group = call->group});
    const auto classes = sums[rows * count].item<int64_t>();
    check_classes(own, each, classes, sums[rows * count + 1].item<int64_t>(),
                  call->group);
    call->classes = classes;
    auto valid = target.ne(options.ignore_index);
    check_targets(target, valid, classes);

    auto log_sum = row(0).log();
    auto loss = log_sum - row(1);
    if (smooth) {
      loss.mul_(1 - options.label_smoothing)
          .add_(log_sum - row(2) / classes, options.label_smoothing);
    }
    loss.masked_fill_(valid.logical_not(), 0);
    probabilities.div_(row(0).to(logits.scalar_type()).unsqueeze(-1));

    auto weight = valid.to(logits.scalar_type());
    // If all targets are ignored, the mean is NaN and its gradient 0.
    if (is_mean(options)) weight /= weight.sum().clamp_min(1);
    context->save_for_backward(
        {probabilities.to(given.scalar_type()), local, here, weight});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    if (is_mean(options)) return (loss.sum() / valid.sum()).to(logits.dtype());
    if (is_sum(options)) loss = loss.sum();
    return loss.to(logits.scalar_type());
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    if (at::GradMode::is_enabled()) {
      throw std::runtime_error(
          "vocab_parallel_cross_entropy has no second derivative; call "
          "backward() without create_graph");
    }
    auto saved = context->get_saved_variables();
    const at::Tensor& probabilities = saved[0];
    const at::Tensor& local = saved[1];
    const at::Tensor& here = saved[2];
    auto kept = context->saved_data.at("call").toCapsule();
    const auto& call = static_cast<const LossCall&>(*kept);
    const double smoothing = call.options.label_smoothing;
    // The gradient of each target's own loss.
    auto factor = (saved[3] * gradients[0]).unsqueeze(-1);
    auto gradient = probabilities * factor;
    if (gradient.size(1) > 0) {
      gradient.scatter_add_(
          -1, local.unsqueeze(-1),
          (factor * (smoothing - 1))
              .masked_fill_(here.logical_not().unsqueeze(-1), 0)
              .to(gradient.scalar_type()));
      if (smoothing > 0) {
        gradient.sub_(factor * (smoothing / call.classes));
      }
    }
    return {gradient.to(probabilities.scalar_type()), {}, {}};
  }
};

}  // namespace
}  // namespace lockstep::internal

namespace lockstep::nn {

at::Tensor vocab_parallel_cross_entropy(
    const at::Tensor& logits, const at::Tensor& target,
    const VocabParallelCrossEntropyOptions& options) {
  internal::check_loss_arguments(logits, target, options);
  auto group = internal::tensor_group(options.group);
  auto flat = logits.reshape({target.numel(), logits.size(-1)});
  auto flat_target = target.reshape({-1});
  at::Tensor loss;
  if (group) {
    loss = internal::VocabParallelCrossEntropy::apply(
        flat, flat_target,
        c10::make_intrusive<internal::LossCall>(options, group));
  } else {
    const auto reduction = internal::is_mean(options)  ? at::Reduction::Mean
                           : internal::is_sum(options) ? at::Reduction::Sum
                                                       : at::Reduction::None;
    loss = at::cross_entropy_loss(
        flat.to(at::toOpMathType(logits.scalar_type())), flat_target,
        /*weight=*/{}, reduction, options.ignore_index,
        options.label_smoothing);
  }
  return loss.dim() == 0 ? loss : loss.view(target.sizes());
}

}  // namespace lockstep::nn
