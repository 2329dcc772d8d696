#include "lockstep/parallel/context/ulysses_attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/context/attention_call.h"
#include "lockstep/parallel/context/context_chunks.h"

namespace lockstep {
namespace internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Elements that go to, or come from, each rank.
using Splits = std::vector<int64_t>;

// all_to_all_single of a flat tensor, with autograd: gradients go back the way
// that the elements came.
class ExchangeFunction : public torch::autograd::Function<ExchangeFunction> {
 public:
  struct Call : torch::CustomClassHolder {
    ProcessGroupPtr group;
    std::optional<std::chrono::milliseconds> timeout;
    Splits sends;
    Splits receives;
  };
  using CallPtr = c10::intrusive_ptr<Call>;

  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const CallPtr& call) {
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    const auto count = std::accumulate(call->receives.begin(),
                                       call->receives.end(), int64_t{0});
    auto output = at::empty({count}, input.options());
    all_to_all_single(output, input,
                      {.output_split_sizes = call->receives,
                       .input_split_sizes = call->sends,
                       .group = call->group,
                       .timeout = call->timeout});
    return output;
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& grad_outputs) {
    const auto kept = context->saved_data["call"].toCapsule();
    const auto& there = static_cast<const Call&>(*kept);
    auto back = c10::make_intrusive<Call>();
    back->group = there.group;
    back->timeout = there.timeout;
    back->sends = there.receives;
    back->receives = there.sends;
    return {apply(grad_outputs[0].contiguous(), back), at::Tensor()};
  }
};

// A tensor of the exchange, without its sequence: [batch, heads of one rank,
// lengths[r], head_dim] of each rank r.
struct Exchanged {
  int64_t batch;
  int64_t heads;
  int64_t head_dim;
  const std::vector<int64_t>& lengths;

  int64_t elements(size_t rank) const {
    return batch * heads * lengths[rank] * head_dim;
  }
};

// Sends `flat`, which holds the pieces for rank 0, those for rank 1, and so on.
at::Tensor exchange(const AttentionCall& call, const at::Tensor& flat,
                    Splits sends, Splits receives) {
  auto all = c10::make_intrusive<ExchangeFunction::Call>();
  all->group = call.group;
  all->timeout = call.timeout;
  all->sends = std::move(sends);
  all->receives = std::move(receives);
  return ExchangeFunction::apply(flat, all);
}

// Takes [batch, heads, tokens of this rank, head_dim]; returns [batch, heads of
// this rank, all tokens, head_dim] for each of `tensors`, in one exchange.
std::vector<at::Tensor> heads_of_whole_sequences(
    const AttentionCall& call, const std::vector<at::Tensor>& tensors,
    const std::vector<const std::vector<int64_t>*>& lengths) {
  const auto ranks = static_cast<size_t>(call.group->size());
  const auto own = static_cast<size_t>(call.group->rank());
  std::vector<Exchanged> all;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    all.push_back({tensor.size(0), tensor.size(1) / call.group->size(),
                   tensor.size(3), *lengths[i]});
  }
  std::vector<at::Tensor> pieces;
  Splits sends(ranks, 0);
  Splits receives(ranks, 0);
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto& each = all[i];
      pieces.push_back(
          tensors[i]
              .narrow(1, static_cast<int64_t>(rank) * each.heads, each.heads)
              .flatten());
      sends[rank] += each.elements(own);
      receives[rank] += each.elements(rank);
    }
  }
  auto flat = exchange(call, at::cat(pieces), sends, receives);

  std::vector<std::vector<at::Tensor>> parts(tensors.size());
  int64_t begin = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto& each = all[i];
      parts[i].push_back(flat.narrow(0, begin, each.elements(rank))
                             .view({each.batch, each.heads, each.lengths[rank],
                                    each.head_dim}));
      begin += each.elements(rank);
    }
  }
  std::vector<at::Tensor> results;
  for (const auto& each : parts) {
    results.push_back(join_context(each, /*dim=*/2, call.order));
  }
  return results;
}

// The inverse, for one tensor.
at::Tensor part_of_all_heads(const AttentionCall& call, const at::Tensor& heads,
                             const std::vector<int64_t>& lengths) {
  const auto ranks = static_cast<size_t>(call.group->size());
  const auto own = static_cast<size_t>(call.group->rank());
  const Exchanged shape{heads.size(0), heads.size(1), heads.size(3), lengths};
  std::vector<at::Tensor> pieces;
  Splits sends;
  Splits receives(ranks, shape.elements(own));
  for (size_t rank = 0; rank < ranks; ++rank) {
    pieces.push_back(part_of_context(heads, /*dim=*/2, call.order, lengths,
                                     static_cast<int>(rank))
                         .flatten());
    sends.push_back(shape.elements(rank));
  }
  auto flat = exchange(call, at::cat(pieces), sends, receives);
  return flat
      .view({static_cast<int64_t>(ranks), shape.batch, shape.heads,
             lengths[own], shape.head_dim})
      .transpose(0, 1)
      .flatten(1, 2);
}

void check_heads(const AttentionCall& call, const AttentionInputs& inputs) {
  const int64_t ranks = call.group->size();
  const int64_t heads = inputs.query.size(1);
  const int64_t key_heads = inputs.key.size(1);
  if (heads % ranks == 0 && key_heads % ranks == 0) return;
  std::string advice = "use fewer ranks, or use ring_attention()";
  if (heads % ranks == 0) {
    advice = c10::str("repeat keys and values, repeat_interleave(",
                      std::lcm(key_heads, ranks) / key_heads, ", /*dim=*/1), ",
                      advice);
  }
  throw std::invalid_argument(
      c10::str(call.name,
               ": the numbers of heads and of key heads must be multiples of "
               "the ",
               ranks, " ranks, got ", heads, " and ", key_heads, "; ", advice));
}

HeadsAttention attention_of(const UlyssesAttentionOptions& options) {
  if (options.attention) {
    if (options.is_causal || options.scale) {
      throw std::invalid_argument(
          "ulysses_attention: is_causal or scale was given beside attention; "
          "leave them, the function computes all");
    }
    return options.attention;
  }
  return [is_causal = options.is_causal, scale = options.scale](
             const at::Tensor& query, const at::Tensor& key,
             const at::Tensor& value) {
    return at::scaled_dot_product_attention(
        query, key, value, /*attn_mask=*/{}, /*dropout_p=*/0, is_causal, scale,
        /*enable_gqa=*/query.size(1) != key.size(1));
  };
}

// Computes the attention and checks the result of a function of the user.
at::Tensor attend_to_heads(const HeadsAttention& attention,
                           const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value) {
  auto output = attention(query, key, value);
  if (!output.defined() || output.sizes() != query.sizes()) {
    throw std::invalid_argument(
        c10::str("ulysses_attention: attention returned ",
                 output.defined() ? c10::str("shape ", output.sizes())
                                  : std::string("an undefined tensor"),
                 ", but it must return the query's, ", query.sizes()));
  }
  return output;
}

}  // namespace
}  // namespace internal

at::Tensor ulysses_attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value,
                             const UlyssesAttentionOptions& options) {
  const internal::AttentionCall call{
      .name = "ulysses_attention",
      .group = internal::group_or_default(options.group),
      .is_causal = options.is_causal,
      .scale = options.scale,
      .order = options.order,
      .timeout = options.timeout};
  const auto attention = internal::attention_of(options);
  const auto inputs = internal::autocast_inputs({query, key, value});
  internal::check_attention(call, inputs, options.dropout_p);
  internal::check_heads(call, inputs);
  if (call.group->size() == 1) {
    return internal::attend_to_heads(attention, inputs.query, inputs.key,
                                     inputs.value);
  }
  const auto lengths = internal::agree_on_attention(call, inputs);
  internal::require_context_lengths(call.name, call.order, lengths.queries);
  internal::require_context_lengths(call.name, call.order, lengths.keys);
  const auto heads = internal::heads_of_whole_sequences(
      call, {inputs.query, inputs.key, inputs.value},
      {&lengths.queries, &lengths.keys, &lengths.keys});
  const auto output =
      internal::attend_to_heads(attention, heads[0], heads[1], heads[2]);
  return internal::part_of_all_heads(call, output, lengths.queries);
}

}  // namespace lockstep
