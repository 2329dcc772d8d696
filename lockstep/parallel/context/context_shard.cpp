#include "lockstep/parallel/context/context_shard.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <stdexcept>
#include <vector>

#include "lockstep/comm/agreement.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/context/context_chunks.h"

namespace lockstep {
namespace {

ProcessGroupPtr context_group(const ContextShardOptions& options) {
  return internal::group_or_default(options.group);
}

// Returns `dim` counted from the first dimension.
int64_t sequence_dim(const char* name, const at::Tensor& tensor, int64_t dim) {
  const int64_t dims = tensor.defined() ? tensor.dim() : 0;
  if (dim < -dims || dim >= dims) {
    throw std::invalid_argument(
        c10::str(name, ": dim is ", dim, ", but the tensor has ", dims,
                 " dimensions; name the one that is the sequence"));
  }
  return dim < 0 ? dim + dims : dim;
}

std::vector<int64_t> gather_lengths(const CollectiveOptions& call,
                                    int64_t length) {
  std::vector<int64_t> lengths;
  for (const auto& numbers :
       internal::gather_numbers(call.group, {length}, call.timeout)) {
    lengths.push_back(numbers[0]);
  }
  return lengths;
}

}  // namespace

at::Tensor context_shard(const at::Tensor& whole, int64_t dim,
                         const ContextShardOptions& options) {
  const auto group = context_group(options);
  dim = sequence_dim("context_shard", whole, dim);
  std::vector<at::Tensor> chunks;
  for (const auto& chunk : internal::context_chunks(
           options.order, whole.size(dim), group->size(), group->rank())) {
    chunks.push_back(whole.narrow(dim, chunk.begin, chunk.size()));
  }
  return at::cat(chunks, dim).contiguous();
}

at::Tensor context_unshard(const at::Tensor& part, int64_t dim,
                           const ContextShardOptions& options) {
  const CollectiveOptions call{.group = context_group(options),
                               .timeout = options.timeout};
  dim = sequence_dim("context_unshard", part, dim);
  const at::NoGradGuard no_grad;
  const auto lengths = gather_lengths(call, part.size(dim));
  internal::require_context_lengths("context_unshard", options.order, lengths);
  std::vector<at::Tensor> parts;
  for (const int64_t length : lengths) {
    auto shape = part.sizes().vec();
    shape[static_cast<size_t>(dim)] = length;
    parts.push_back(at::empty(shape, part.options()));
  }
  all_gather(parts, part.detach(), call);
  return internal::join_context(parts, dim, options.order);
}

at::Tensor context_positions(int64_t sequence_length,
                             const ContextShardOptions& options) {
  if (sequence_length < 0) {
    throw std::invalid_argument(
        c10::str("context_positions: the sequence length is ", sequence_length,
                 "; it must be 0 or more"));
  }
  return context_shard(at::arange(sequence_length, at::kLong), 0, options);
}

}  // namespace lockstep
