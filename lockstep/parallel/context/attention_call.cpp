#include "lockstep/parallel/context/attention_call.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>

#include <bit>
#include <cmath>
#include <stdexcept>
#include <string>

#include "lockstep/comm/collectives.h"

namespace lockstep::internal {
namespace {

// A number that must be equal on all ranks, and its text in an error.
struct AgreedNumber {
  const char* what;
  int64_t value;
  std::string (*text)(int64_t value);
};

std::string plain_text(int64_t value) { return std::to_string(value); }
std::string flag_text(int64_t value) { return value != 0 ? "true" : "false"; }
std::string order_text(int64_t value) {
  return value == static_cast<int64_t>(ContextOrder::plain) ? "plain"
                                                            : "zigzag";
}
std::string dtype_text(int64_t value) {
  return c10::toString(static_cast<at::ScalarType>(value));
}
// A scale is never 0, so 0 stands for none.
std::string scale_text(int64_t value) {
  return value == 0 ? "none" : c10::str(std::bit_cast<double>(value));
}

std::vector<AgreedNumber> agreed_numbers(const AttentionCall& call,
                                         const AttentionInputs& inputs) {
  const auto& [query, key, value] = inputs;
  const bool requires_grad =
      at::GradMode::is_enabled() &&
      (query.requires_grad() || key.requires_grad() || value.requires_grad());
  return {
      {"the batch size", query.size(0), plain_text},
      {"the number of heads", query.size(1), plain_text},
      {"the number of key heads", key.size(1), plain_text},
      {"head_dim", query.size(3), plain_text},
      {"the dtype", static_cast<int64_t>(query.scalar_type()), dtype_text},
      {"is_causal", call.is_causal ? 1 : 0, flag_text},
      {"order", static_cast<int64_t>(call.order), order_text},
      {"scale", std::bit_cast<int64_t>(call.scale.value_or(0)), scale_text},
      {"whether an input requires grad", requires_grad ? 1 : 0, flag_text},
  };
}

std::string shapes_of(const AttentionInputs& inputs) {
  return c10::str("query ", inputs.query.sizes(), ", key ", inputs.key.sizes(),
                  ", value ", inputs.value.sizes());
}

}  // namespace

AttentionInputs autocast_inputs(const AttentionInputs& inputs) {
  if (!inputs.query.defined()) return inputs;
  const auto device = inputs.query.device().type();
  if (!at::autocast::is_autocast_available(device) ||
      !at::autocast::is_autocast_enabled(device)) {
    return inputs;
  }
  const auto dtype = at::autocast::get_autocast_dtype(device);
  auto cast = [&](const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, device);
  };
  return {cast(inputs.query), cast(inputs.key), cast(inputs.value)};
}

void check_attention(const AttentionCall& call, const AttentionInputs& inputs,
                     double dropout_p) {
  const auto& [query, key, value] = inputs;
  auto mistake = [&](const std::string& text) {
    return std::invalid_argument(std::string(call.name) + ": " + text);
  };
  for (const auto& tensor : {query, key, value}) {
    if (!tensor.defined() || tensor.dim() != 4) {
      throw mistake(c10::str(
          "query, key and value must be [batch, heads, tokens, head_dim], got ",
          tensor.defined() ? c10::str(tensor.dim(), " dimensions")
                           : std::string("an undefined tensor")));
    }
  }
  if (key.sizes() != value.sizes()) {
    throw mistake("key and value must have one shape, got " +
                  shapes_of(inputs));
  }
  if (query.size(0) != key.size(0) || query.size(3) != key.size(3)) {
    throw mistake("query and key must have one batch size and head_dim, got " +
                  shapes_of(inputs));
  }
  if (query.size(3) == 0 || query.size(1) == 0 || key.size(1) == 0 ||
      query.size(1) % key.size(1) != 0) {
    throw mistake(
        "the number of heads must be a multiple of the number of key heads, "
        "and both and head_dim at least 1, got " +
        shapes_of(inputs));
  }
  for (const auto& tensor : {key, value}) {
    if (tensor.scalar_type() != query.scalar_type() ||
        tensor.device() != query.device()) {
      throw mistake(c10::str(
          "query, key and value must have one dtype and device, got ",
          c10::toString(query.scalar_type()), " on ", query.device(), " and ",
          c10::toString(tensor.scalar_type()), " on ", tensor.device()));
    }
  }
  const auto dtype = query.scalar_type();
  if (dtype != at::kDouble && dtype != at::kFloat && dtype != at::kBFloat16 &&
      dtype != at::kHalf) {
    throw mistake(c10::str("got ", c10::toString(dtype),
                           " tensors; allowed are Double, Float, BFloat16 and "
                           "Half"));
  }
  if (call.is_causal && query.size(2) != key.size(2)) {
    throw mistake(
        "with is_causal this rank's queries and keys must be of the same "
        "tokens, got " +
        shapes_of(inputs));
  }
  // LibTorch's kernels scale after masking, so a negative scale unmasks.
  if (call.scale && !(std::isfinite(*call.scale) && *call.scale > 0)) {
    throw mistake(c10::str("scale is ", *call.scale,
                           "; give a finite number above 0, or none"));
  }
  if (dropout_p != 0) {
    throw mistake(c10::str("dropout_p is ", dropout_p,
                           ", but there is no dropout of attention here; it "
                           "must be 0: drop out the result instead"));
  }
}

AttentionLengths agree_on_attention(const AttentionCall& call,
                                    const AttentionInputs& inputs) {
  const auto& group = call.group;
  const auto agreed = agreed_numbers(call, inputs);
  std::vector<int64_t> row{inputs.query.size(2), inputs.key.size(2)};
  for (const auto& number : agreed) row.push_back(number.value);
  auto own = at::tensor(row, at::kLong).to(group->control_device());
  auto rows = at::empty({group->size(), own.numel()}, own.options());
  all_gather_into_tensor(rows, own, {.group = group, .timeout = call.timeout});
  rows = rows.cpu();

  AttentionLengths lengths;
  for (int64_t rank = 0; rank < group->size(); ++rank) {
    const auto* theirs = rows[rank].const_data_ptr<int64_t>();
    lengths.queries.push_back(*theirs++);
    lengths.keys.push_back(*theirs++);
    for (const auto& number : agreed) {
      // All ranks compare with rank 0, so that they throw the same.
      const auto first = rows[0][&number - agreed.data() + 2].item<int64_t>();
      if (*theirs != first) {
        throw std::invalid_argument(c10::str(
            call.name, ": the ranks of the group differ in ", number.what, ": ",
            number.text(first), " on rank 0, ", number.text(*theirs),
            " on rank ", rank, "; it must be the same on all"));
      }
      ++theirs;
    }
  }
  return lengths;
}

}  // namespace lockstep::internal
