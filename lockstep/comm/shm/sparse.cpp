#include "lockstep/comm/shm/sparse.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <vector>

#include "lockstep/comm/shm/piece.h"
#include "lockstep/comm/shm/protocol/core.h"
#include "lockstep/comm/shm/protocol_call.h"

namespace lockstep::internal::shm {
namespace {

constexpr size_t kMostDimensions = 16;

// The facts about a rank's tensor that the peers need before they receive it.
struct Outline {
  int64_t average;  // 1: the mean is asked for, not the sum
  int64_t entries;
  int64_t sparse_dims;
  int64_t dense_dims;
  std::array<int64_t, kMostDimensions> sizes;
};

Outline outline_of(const at::Tensor& coalesced, bool average) {
  Outline outline{.average = average,
                  .entries = coalesced._nnz(),
                  .sparse_dims = coalesced.sparse_dim(),
                  .dense_dims = coalesced.dense_dim(),
                  .sizes = {}};
  std::ranges::copy(coalesced.sizes(), outline.sizes.begin());
  return outline;
}

std::string describe(const Outline& outline) {
  const auto dims =
      static_cast<size_t>(outline.sparse_dims + outline.dense_dims);
  return c10::str(outline.average ? "AVG" : "SUM", " of sparse ",
                  at::IntArrayRef(outline.sizes.data(), dims), " with ",
                  outline.dense_dims, " dense dimensions");
}

bool same_form(const Outline& a, const Outline& b) {
  return a.average == b.average && a.sparse_dims == b.sparse_dims &&
         a.dense_dims == b.dense_dims && a.sizes == b.sizes;
}

std::vector<Outline> gather_outlines(Group& group, const Outline& own,
                                     const Deadline& deadline) {
  std::vector<Outline> all(group.size());
  std::vector<Bytes> outputs;
  for (auto& outline : all) outputs.push_back({&outline, sizeof(Outline)});
  group.all_gather(outputs, {&own, sizeof(own)}, DType::int64, left(deadline));
  for (int rank = 0; rank < group.size(); ++rank) {
    if (same_form(all[rank], all[0])) continue;
    const auto& waiting = group.core().waiting;
    throw CallMismatch(c10::str(
        "the ranks disagree about this call: ", waiting.name(0), " gave ",
        describe(all[0]), ", ", waiting.name(rank), " ", describe(all[rank])));
  }
  return all;
}

std::vector<at::Tensor> gather(Group& group, const at::Tensor& own,
                               const std::vector<at::Tensor>& all,
                               const Deadline& deadline) {
  std::vector<Bytes> outputs;
  for (const auto& each : all) {
    outputs.push_back({each.data_ptr(), each.nbytes()});
  }
  group.all_gather(outputs, {own.const_data_ptr(), own.nbytes()},
                   moved_as(own.scalar_type()), left(deadline));
  return all;
}

}  // namespace

at::Tensor sum_sparse(Group& group, const at::Tensor& tensor, bool average,
                      const Deadline& deadline) {
  const auto own = tensor.coalesce();
  const auto places = own.indices().contiguous();
  const auto values = own.values().contiguous();
  const auto outlines =
      gather_outlines(group, outline_of(own, average), deadline);
  std::vector<at::Tensor> all_places;
  std::vector<at::Tensor> all_values;
  for (const auto& outline : outlines) {
    all_places.push_back(
        at::empty({places.size(0), outline.entries}, places.options()));
    auto shape = values.sizes().vec();
    shape[0] = outline.entries;
    all_values.push_back(at::empty(shape, values.options()));
  }
  gather(group, places, all_places, deadline);
  gather(group, values, all_values, deadline);

  // LibTorch has no sparse sum of the half types on CPUs.
  const auto accumulated = c10::isReducedFloatingType(tensor.scalar_type())
                               ? at::kFloat
                               : tensor.scalar_type();
  at::Tensor sum;
  for (size_t rank = 0; rank < outlines.size(); ++rank) {
    auto part = at::_sparse_coo_tensor_unsafe(
        all_places[rank], all_values[rank].to(accumulated), own.sizes());
    part._coalesced_(true);
    sum = rank == 0 ? part : sum.add(part);
  }
  sum = sum.coalesce();
  if (average) sum = sum.div(group.size());
  return sum.to(tensor.scalar_type());
}

void require_sparse(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kSparse ||
      tensor.dim() > static_cast<int64_t>(kMostDimensions)) {
    throw std::invalid_argument(c10::str(
        "all_reduce: a tensor is ", tensor.layout(), " on ", tensor.device(),
        " with ", tensor.dim(),
        " dimensions; allowed are Sparse (COO) tensors on cpu of up to ",
        kMostDimensions));
  }
  if (op != c10d::ReduceOp::SUM && op != c10d::ReduceOp::AVG) {
    throw std::invalid_argument(
        "all_reduce: sparse tensors are reduced by SUM and AVG only");
  }
}

}  // namespace lockstep::internal::shm
