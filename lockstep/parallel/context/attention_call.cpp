#include "lockstep/parallel/context/attention_call.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/object_collectives.h"

namespace lockstep::internal {
namespace {

using NamedText = std::pair<const char*, std::string>;

// The values that must be equal on all ranks.
std::vector<NamedText> agreed_texts(const AttentionCall& call,
                                    const AttentionInputs& inputs) {
  const auto& [query, key, value] = inputs;
  const bool requires_grad =
      at::GradMode::is_enabled() &&
      (query.requires_grad() || key.requires_grad() || value.requires_grad());
  const auto flag = [](bool one) { return one ? "true" : "false"; };
  return {
      {"the batch size", std::to_string(query.size(0))},
      {"the number of heads", std::to_string(query.size(1))},
      {"the number of key heads", std::to_string(key.size(1))},
      {"head_dim", std::to_string(query.size(3))},
      {"the dtype", c10::toString(query.scalar_type())},
      {"is_causal", flag(call.is_causal)},
      {"order", call.order == ContextOrder::plain ? "plain" : "zigzag"},
      {"scale", call.scale ? Object(*call.scale).dump() : "none"},
      {"whether an input requires grad", flag(requires_grad)},
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
  Agreement agreement(call.group, {.timeout = call.timeout});
  for (auto& [name, text] : agreed_texts(call, inputs)) {
    agreement.hold(name, std::move(text));
  }
  agreement.tell({inputs.query.size(2), inputs.key.size(2)});
  if (const auto difference = agreement.compare()) {
    throw std::invalid_argument(c10::str(call.name, ": ", difference->words(),
                                         "; it must be the same on all"));
  }
  AttentionLengths lengths;
  for (const auto& tokens : agreement.told()) {
    lengths.queries.push_back(tokens[0]);
    lengths.keys.push_back(tokens[1]);
  }
  return lengths;
}

}  // namespace lockstep::internal
