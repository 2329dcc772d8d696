#include "tests/parallel/fuzz/case.h"

#include <algorithm>

namespace lockstep::internal::fuzz {

bool has_conditions(const Case& fuzz_case) {
  return std::ranges::any_of(fuzz_case.ops, [](const Op& op) {
    return op.use != Use::always || op.loss_use != Use::always;
  });
}

std::vector<size_t> ops_of(const Case& fuzz_case, int wrapper) {
  static constexpr Part kHeads[] = {Part::first_head, Part::second_head,
                                    Part::third_head};
  const auto head = kHeads[wrapper];
  std::vector<size_t> indices;
  for (size_t i = 0; i < fuzz_case.ops.size(); ++i) {
    const auto part = fuzz_case.ops[i].part;
    if (part == Part::trunk || part == head) indices.push_back(i);
  }
  return indices;
}

std::vector<size_t> parameters_of(const Case& fuzz_case, int wrapper) {
  std::vector<bool> is_needed(fuzz_case.parameters.size(), wrapper == 0);
  if (wrapper == 0) {
    for (const auto& op : fuzz_case.ops) {
      for (size_t i : op.parameters) is_needed[i] = false;
    }
  }
  for (size_t op : ops_of(fuzz_case, wrapper)) {
    for (size_t i : fuzz_case.ops[op].parameters) is_needed[i] = true;
  }
  std::vector<size_t> indices;
  for (size_t i = 0; i < is_needed.size(); ++i) {
    if (is_needed[i]) indices.push_back(i);
  }
  return indices;
}

const char* name_of(OpKind kind) {
  static constexpr const char* kNames[] = {"linear",
                                           "linear_in_place",
                                           "product",
                                           "masked",
                                           "outer",
                                           "batched",
                                           "where",
                                           "addmm",
                                           "lora",
                                           "merged_lora",
                                           "custom",
                                           "transposed",
                                           "reshaped",
                                           "chunked",
                                           "scale",
                                           "bias",
                                           "scalar",
                                           "rotated",
                                           "empty",
                                           "embedding",
                                           "running_mean",
                                           "auxiliary_loss",
                                           "returned_parameter"};
  return kNames[static_cast<size_t>(kind)];
}

const char* name_of(EventKind kind) {
  static constexpr const char* kNames[] = {
      "forward",        "backward",         "gradient",
      "zero_grad",      "keep_gradients",   "restore_gradients",
      "hold_gradients", "change_gradients", "round_trip",
      "set_frozen",     "wrap_again",       "step"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace lockstep::internal::fuzz
