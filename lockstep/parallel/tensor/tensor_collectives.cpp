#include "lockstep/parallel/tensor/tensor_collectives.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/parallel/tensor/tensor_part.h"

namespace lockstep {
namespace internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Whether nothing else refers to `gradient`, so that it may be overwritten:
// autograd gives one tensor to several nodes, and hooks may keep it.
bool is_owned(const at::Tensor& gradient) {
  return gradient.use_count() == 1 && gradient.has_storage() &&
         gradient.storage().use_count() == 1 && gradient.is_contiguous();
}

at::Tensor sum_over_ranks(const at::Tensor& tensor,
                          const ProcessGroupPtr& group) {
  auto sum = tensor.clone(at::MemoryFormat::Contiguous);
  all_reduce(sum, {.group = group});
  return sum;
}

// Returns the sum of a gradient, in its own memory if that is possible.
at::Tensor sum_of_gradients(const at::Tensor& gradient,
                            const ProcessGroupPtr& group) {
  if (!is_owned(gradient)) return sum_over_ranks(gradient, group);
  all_reduce(gradient, {.group = group});
  return gradient;
}

// Returns [ranks * rows of `part`, ...]: all ranks' parts of the first
// dimension.
at::Tensor gather_rows(const at::Tensor& part, const ProcessGroupPtr& group) {
  auto shape = part.sizes().vec();
  shape[0] *= group->size();
  auto all = at::empty(shape, part.options());
  all_gather_into_tensor(all, part.contiguous(), {.group = group});
  return all;
}

// Gathers dimension `dim`, of which all ranks together have `size` indices. All
// ranks send as many as the first one has; what is too much comes last.
at::Tensor gather_parts(const at::Tensor& part, int64_t dim, int64_t size,
                        const ProcessGroupPtr& group) {
  const int64_t ranks = group->size();
  const int64_t each = (size + ranks - 1) / ranks;
  auto sent = part;
  if (const int64_t missing = each - part.size(dim); missing > 0) {
    std::vector<int64_t> pad(static_cast<size_t>(2 * (part.dim() - dim)), 0);
    pad.back() = missing;
    sent = at::constant_pad_nd(part, pad);
  }
  at::Tensor all;
  if (dim == 0) {
    all = gather_rows(sent, group);
  } else {
    // In memory the ranks' parts follow each other.
    all = gather_rows(sent.unsqueeze(0), group)
              .movedim(0, dim)
              .flatten(dim, dim + 1);
  }
  // Not a view, or the result could not be modified in place.
  return all.narrow(dim, 0, size).variable_data();
}

// Returns this rank's part of the sum. The ranks have equal parts of `dim`.
at::Tensor reduce_scatter_parts(const at::Tensor& terms, int64_t dim,
                                const ProcessGroupPtr& group) {
  const int64_t ranks = group->size();
  auto shape = terms.sizes().vec();
  shape[static_cast<size_t>(dim)] /= ranks;
  auto sum = at::empty(shape, terms.options());
  // The part of each rank must be contiguous.
  auto by_rank = terms;
  if (dim > 0) {
    auto apart = terms.sizes().vec();
    apart[static_cast<size_t>(dim)] /= ranks;
    apart.insert(apart.begin() + dim, ranks);
    by_rank = terms.reshape(apart).movedim(dim, 0);
  }
  reduce_scatter_tensor(sum, by_rank.contiguous(), {.group = group});
  return sum;
}

at::Tensor own_part(const at::Tensor& whole, int64_t dim,
                    const ProcessGroupPtr& group) {
  const Range range = tensor_part(whole.size(dim), group);
  return whole.narrow(dim, range.begin, range.size());
}

// The values that backward needs.
struct Crossing : torch::CustomClassHolder {
  Crossing(ProcessGroupPtr ranks, int64_t divided, int64_t whole)
      : group(std::move(ranks)), dim(divided), size(whole) {}
  ProcessGroupPtr group;
  int64_t dim = 0;
  int64_t size = 0;  // of dimension `dim` of the whole tensor
};
using CrossingPtr = c10::intrusive_ptr<Crossing>;

CrossingPtr crossing_of(const AutogradContext& context) {
  return c10::static_intrusive_pointer_cast<Crossing>(
      context.saved_data.at("crossing").toCapsule());
}

// A node for each row of the table in the header. `Row` has
//   forward(input, crossing): the result, in a tensor or view of its own;
//   backward(gradient, crossing): the same for the gradient, with functions
//     that autograd differentiates if there is to be a second derivative.
template <typename Row>
class TensorFunction : public torch::autograd::Function<TensorFunction<Row>> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const CrossingPtr& crossing) {
    context->saved_data["crossing"] = c10::IValue::make_capsule(crossing);
    return Row::forward(input, *crossing);
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    return {Row::backward(gradients[0], *crossing_of(*context)), {}};
  }
};

template <typename Row>
at::Tensor cross(const at::Tensor& input, const ProcessGroupPtr& group,
                 int64_t dim = 0, int64_t size = 0) {
  return TensorFunction<Row>::apply(
      input, c10::make_intrusive<Crossing>(group, dim, size));
}

struct Copy {
  static at::Tensor forward(const at::Tensor& input, const Crossing&) {
    return input;
  }
  static at::Tensor backward(const at::Tensor& gradient,
                             const Crossing& crossing) {
    if (!at::GradMode::is_enabled()) {
      return sum_of_gradients(gradient, crossing.group);
    }
    return reduce_from_tensor_group(gradient, crossing.group);
  }
};

struct Reduce {
  static at::Tensor forward(const at::Tensor& input, const Crossing& crossing) {
    return sum_over_ranks(input, crossing.group);
  }
  static at::Tensor backward(const at::Tensor& gradient,
                             const Crossing& crossing) {
    if (!at::GradMode::is_enabled()) return gradient;
    return copy_to_tensor_group(gradient, crossing.group);
  }
};

struct ReduceInPlace : Reduce {
  static at::Tensor forward(const at::Tensor& input, const Crossing& crossing) {
    // The same memory in a tensor without history.
    auto sum = input.variable_data();
    all_reduce(sum, {.group = crossing.group});
    return sum;
  }
};

struct Gather {
  static at::Tensor forward(const at::Tensor& input, const Crossing& crossing) {
    return gather_parts(input, crossing.dim, crossing.size, crossing.group);
  }
  static at::Tensor backward(const at::Tensor& gradient,
                             const Crossing& crossing) {
    return scatter_to_tensor_group(gradient, crossing.dim, crossing.group);
  }
};

struct Scatter {
  static at::Tensor forward(const at::Tensor& input, const Crossing& crossing) {
    return own_part(input, crossing.dim, crossing.group);
  }
  static at::Tensor backward(const at::Tensor& gradient,
                             const Crossing& crossing) {
    return gather_from_tensor_group(gradient, crossing.dim, crossing.group,
                                    crossing.size);
  }
};

struct GatherSequence : Gather {
  static at::Tensor backward(const at::Tensor& gradient,
                             const Crossing& crossing) {
    return reduce_scatter_sequence(gradient, crossing.dim, crossing.group);
  }
};

struct ReduceScatterSequence {
  static at::Tensor forward(const at::Tensor& input, const Crossing& crossing) {
    return reduce_scatter_parts(input, crossing.dim, crossing.group);
  }
  static at::Tensor backward(const at::Tensor& gradient,
                             const Crossing& crossing) {
    return all_gather_sequence(gradient, crossing.dim, crossing.group);
  }
};

class CopyBoth : public torch::autograd::Function<CopyBoth> {
 public:
  static variable_list forward(AutogradContext* context,
                               const at::Tensor& first,
                               const at::Tensor& second,
                               const CrossingPtr& crossing) {
    context->saved_data["crossing"] = c10::IValue::make_capsule(crossing);
    return {first, second};
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    auto group = crossing_of(*context)->group;
    if (at::GradMode::is_enabled()) {
      return {reduce_from_tensor_group(gradients[0], group),
              reduce_from_tensor_group(gradients[1], group),
              {}};
    }
    variable_list sums;
    for (const auto& gradient : gradients) {
      sums.push_back(is_owned(gradient)
                         ? gradient
                         : gradient.clone(at::MemoryFormat::Contiguous));
    }
    all_reduce_coalesced(sums, {.group = group});
    return {sums[0], sums[1], {}};
  }
};

int64_t wrapped(const at::Tensor& input, int64_t dim) {
  return at::maybe_wrap_dim(dim, input.dim());
}

}  // namespace

at::Tensor reduce_in_place(const at::Tensor& input,
                           const ProcessGroupPtr& group) {
  return cross<ReduceInPlace>(input, group);
}

std::tuple<at::Tensor, at::Tensor> copy_both(const at::Tensor& first,
                                             const at::Tensor& second,
                                             const ProcessGroupPtr& group) {
  if (!first.defined() || !second.defined()) {
    auto copy = [&](const at::Tensor& tensor) {
      return tensor.defined() ? cross<Copy>(tensor, group) : tensor;
    };
    return {copy(first), copy(second)};
  }
  auto both = CopyBoth::apply(first, second,
                              c10::make_intrusive<Crossing>(group, 0, 0));
  return {both[0], both[1]};
}

}  // namespace internal

at::Tensor copy_to_tensor_group(const at::Tensor& input,
                                const ProcessGroupPtr& given) {
  auto group = internal::tensor_group(given);
  return group ? internal::cross<internal::Copy>(input, group) : input;
}

at::Tensor reduce_from_tensor_group(const at::Tensor& input,
                                    const ProcessGroupPtr& given) {
  auto group = internal::tensor_group(given);
  return group ? internal::cross<internal::Reduce>(input, group) : input;
}

at::Tensor gather_from_tensor_group(const at::Tensor& input, int64_t dim,
                                    const ProcessGroupPtr& given,
                                    std::optional<int64_t> size) {
  auto group = internal::tensor_group(given);
  if (!group) return input;
  dim = internal::wrapped(input, dim);
  const int64_t own = input.size(dim);
  if (size && internal::tensor_part(*size, group).size() != own) {
    throw std::invalid_argument(
        c10::str("gather_from_tensor_group: dimension ", dim,
                 " of the input has ", own, " indices, but of ", *size,
                 " this rank has ", internal::tensor_part(*size, group).size(),
                 "; give the part that scatter_to_tensor_group() makes"));
  }
  return internal::cross<internal::Gather>(input, group, dim,
                                           size.value_or(own * group->size()));
}

at::Tensor scatter_to_tensor_group(const at::Tensor& input, int64_t dim,
                                   const ProcessGroupPtr& given) {
  auto group = internal::tensor_group(given);
  if (!group) return input;
  dim = internal::wrapped(input, dim);
  return internal::cross<internal::Scatter>(input, group, dim, input.size(dim));
}

at::Tensor all_gather_sequence(const at::Tensor& input, int64_t dim,
                               const ProcessGroupPtr& given) {
  auto group = internal::tensor_group(given);
  if (!group) return input;
  dim = internal::wrapped(input, dim);
  return internal::cross<internal::GatherSequence>(
      input, group, dim, input.size(dim) * group->size());
}

at::Tensor reduce_scatter_sequence(const at::Tensor& input, int64_t dim,
                                   const ProcessGroupPtr& given) {
  auto group = internal::tensor_group(given);
  if (!group) return input;
  dim = internal::wrapped(input, dim);
  if (input.size(dim) % group->size() != 0) {
    throw std::invalid_argument(c10::str(
        "reduce_scatter_sequence: dimension ", dim, " has ", input.size(dim),
        " indices, of which ", group->size(),
        " ranks cannot have equal parts; pad the sequence to a multiple of ",
        group->size()));
  }
  return internal::cross<internal::ReduceScatterSequence>(input, group, dim);
}

}  // namespace lockstep
