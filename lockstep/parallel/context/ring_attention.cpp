#include "lockstep/parallel/context/ring_attention.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "lockstep/comm/init.h"
#include "lockstep/parallel/context/attention_block.h"
#include "lockstep/parallel/context/attention_call.h"
#include "lockstep/parallel/context/context_chunks.h"
#include "lockstep/parallel/context/ring_messages.h"

namespace lockstep {
namespace internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The parts that forward and backward share. The autograd context keeps it.
struct Ring : torch::CustomClassHolder {
  AttentionCall call;
  std::shared_ptr<const RingPlan> plan;

  std::optional<AttentionBlock> block(int source) const {
    return plan->block(call.group->rank(), source);
  }
};
using RingPtr = c10::intrusive_ptr<Ring>;

class RingAttentionFunction
    : public torch::autograd::Function<RingAttentionFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query,
                            const at::Tensor& key, const at::Tensor& value,
                            const RingPtr& ring) {
    AttentionSum sum(query, ring->call.scale);
    KeyValueRing blocks(ring->call, ring->plan, at::stack({key, value}));
    for (int step = 0; step < ring->plan->ranks(); ++step) {
      blocks.start_next();
      if (auto block = ring->block(blocks.source())) {
        sum.add(*block, blocks.key(), blocks.value());
      }
      blocks.finish_next();
    }
    auto output = sum.output();
    context->save_for_backward({query, key, value, output, sum.logsumexp()});
    context->saved_data["ring"] = c10::IValue::make_capsule(ring);
    return output;
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& grad_outputs) {
    if (at::GradMode::is_enabled()) {
      throw std::runtime_error(
          "ring_attention has no second derivative; call backward() without "
          "create_graph");
    }
    const auto saved = context->get_saved_variables();
    const at::Tensor& key = saved[1];
    const auto kept = context->saved_data["ring"].toCapsule();
    const auto& ring = static_cast<const Ring&>(*kept);
    const AttentionResult result{.query = saved[0],
                                 .output = saved[3],
                                 .logsumexp = saved[4],
                                 .grad_output = grad_outputs[0]};
    const auto dtype = sum_dtype(key);
    auto grad_query =
        at::zeros(result.query.sizes(), result.query.options().dtype(dtype));
    auto own = at::stack({key, saved[2]});
    GradientRing gradients(ring.call, ring.plan, own, dtype);
    KeyValueRing blocks(ring.call, ring.plan, std::move(own));
    for (int step = 0; step < ring.plan->ranks(); ++step) {
      blocks.start_next();
      BlockGradients part;
      const auto block = ring.block(blocks.source());
      if (block) {
        part = block_gradients(*block, result, blocks.key(), blocks.value(),
                               ring.call.scale);
      }
      // The sum of the ranks before this one came while this one computed.
      const auto& sum = gradients.receive();
      if (block) add_gradients(*block, part, grad_query, sum);
      gradients.pass_on();
      blocks.finish_next();
    }
    const auto grad_own = gradients.own().to(key.scalar_type());
    return {grad_query.to(key.scalar_type()), grad_own[0], grad_own[1], {}};
  }
};

}  // namespace
}  // namespace internal

at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value,
                          const RingAttentionOptions& options) {
  const internal::AttentionCall call{
      .name = "ring_attention",
      .group = internal::group_or_default(options.group),
      .is_causal = options.is_causal,
      .scale = options.scale,
      .order = options.order,
      .timeout = options.timeout};
  const auto inputs = internal::autocast_inputs({query, key, value});
  internal::check_attention(call, inputs, options.dropout_p);
  if (call.group->size() == 1) {
    return at::scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value, /*attn_mask=*/{},
        /*dropout_p=*/0, call.is_causal, call.scale,
        /*enable_gqa=*/query.size(1) != key.size(1));
  }
  auto lengths = internal::agree_on_attention(call, inputs);
  if (call.is_causal) {
    internal::require_context_lengths(call.name, call.order, lengths.keys);
  }
  // The kernels divide by the batch size.
  if (inputs.query.size(0) == 0) {
    lengths.queries.assign(lengths.queries.size(), 0);
  }
  auto ring = c10::make_intrusive<internal::Ring>();
  ring->call = call;
  ring->plan = std::make_shared<internal::RingPlan>(std::move(lengths),
                                                    call.order, call.is_causal);
  return internal::RingAttentionFunction::apply(inputs.query, inputs.key,
                                                inputs.value, ring);
}

}  // namespace lockstep
