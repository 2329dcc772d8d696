#include "lockstep/parallel/zero/updated_parameters.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/collective_call.h"
#include "lockstep/comm/collective_work.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/empty_shared.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/parallel/zero/partition.h"
#include "lockstep/trace/span.h"

namespace lockstep::internal {
namespace {

// The alignment in bytes of every piece in the buffer: a cache line, and a
// multiple of every element's size.
constexpr int64_t kPieceAlignment = 64;

int64_t aligned(size_t bytes) {
  return (static_cast<int64_t>(bytes) + kPieceAlignment - 1) / kPieceAlignment *
         kPieceAlignment;
}

// Returns a contiguous tensor with the shape and dtype of `like`, at byte
// `offset` of `bytes`.
at::Tensor place(const at::Tensor& bytes, int64_t offset,
                 const at::Tensor& like) {
  const auto item = static_cast<int64_t>(like.element_size());
  const auto strides =
      at::empty(like.sizes(), c10::TensorOptions(c10::kMeta)).strides().vec();
  at::Tensor tensor = at::empty({0}, like.options().requires_grad(false));
  tensor.set_(bytes.storage(), bytes.storage_offset() / item + offset / item,
              like.sizes(), strides);
  return tensor;
}

// Two cache lines, because some processors fetch two together.
constexpr int64_t kParameterAlignment = 128;

// Two parameters that overlap in memory would not be tied any more after the
// move.
void refuse_overlaps(const std::vector<at::Tensor>& parameters) {
  std::vector<std::pair<const char*, const char*>> places;
  for (const at::Tensor& parameter : parameters) {
    const auto* begin = static_cast<const char*>(parameter.const_data_ptr());
    places.emplace_back(begin, begin + parameter.nbytes());
  }
  std::sort(places.begin(), places.end());
  for (size_t i = 1; i < places.size(); ++i) {
    if (places[i].first < places[i - 1].second) {
      throw std::invalid_argument(
          "shared_parameters: two parameters share memory; register one tensor "
          "under both names, or use shared_parameters = false");
    }
  }
}

}  // namespace

ParameterGather::ParameterGather(const std::vector<at::Tensor>& parameters,
                                 const std::vector<Ranges>& ranges,
                                 ProcessGroupPtr group)
    : group_(std::move(group)) {
  const at::NoGradGuard no_grad;
  const auto size = static_cast<size_t>(group_->size());
  const auto rank = static_cast<size_t>(group_->rank());
  if (size == 1) return;
  std::map<std::string, std::vector<Small>> small;  // by device
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    auto& on_device = small[parameter.device().str()];
    const int64_t piece = ranges[i][0].end - ranges[i][0].begin;
    const bool cut = piece > 0 && piece < parameter.numel();
    if (cut) {
      const int64_t even = piece * static_cast<int64_t>(size);
      const int64_t begin = ranges[i][rank].begin;
      in_place_.push_back({memory_slice(parameter, {0, even}),
                           memory_slice(parameter, {begin, begin + piece})});
      if (even < parameter.numel()) {
        on_device.push_back(
            {memory_slice(parameter, {even, parameter.numel()}), size - 1});
      }
      continue;
    }
    if (parameter.numel() == 0) continue;
    const auto owner = static_cast<size_t>(
        std::find_if(ranges[i].begin(), ranges[i].end(),
                     [](Range r) { return r.end > r.begin; }) -
        ranges[i].begin());
    if (parameter.nbytes() < kLarge) {
      on_device.push_back({memory_alias(parameter), owner});
    } else {
      broadcasts_.push_back(
          {memory_alias(parameter), group_->global_ranks()[owner]});
    }
  }
  for (const auto& [device, pieces] : small) {
    if (!pieces.empty()) pack(pieces);
  }
}

void ParameterGather::pack(const std::vector<Small>& small) {
  std::map<size_t, int64_t> used;  // by rank
  int64_t total = 0;
  for (const Small& each : small) {
    used[each.rank] += aligned(each.piece.nbytes());
    total += aligned(each.piece.nbytes());
  }
  const int64_t most = 2 * std::max(total / group_->size(), kLeast);
  std::vector<Small> gathered;
  std::map<size_t, std::vector<Small>> alone;
  for (const Small& each : small) {
    (used[each.rank] > most ? alone[each.rank] : gathered).push_back(each);
  }
  if (!gathered.empty()) pack(gathered, true);
  for (const auto& [rank, pieces] : alone) pack(pieces, false);
}

// If not `gathered`: all pieces are of one rank, which broadcasts them.
void ParameterGather::pack(const std::vector<Small>& small, bool gathered) {
  const auto size = static_cast<size_t>(group_->size());
  const auto rank = static_cast<size_t>(group_->rank());
  std::vector<int64_t> used(size);
  std::vector<int64_t> offsets;
  for (const Small& each : small) {
    offsets.push_back(used[each.rank]);
    used[each.rank] += aligned(each.piece.nbytes());
  }
  const int64_t row = *std::max_element(used.begin(), used.end());
  const auto options = at::TensorOptions(small.front().piece.device());
  Packed packed;
  packed.all = empty_shared({gathered ? static_cast<int64_t>(size) * row : row},
                            options.dtype(at::kByte), group_);
  packed.all.zero_();
  if (gathered) {
    packed.mine = packed.all.narrow(0, static_cast<int64_t>(rank) * row, row);
  } else {
    packed.source = group_->global_ranks()[small.front().rank];
  }
  for (size_t i = 0; i < small.size(); ++i) {
    const int64_t begin =
        gathered ? static_cast<int64_t>(small[i].rank) * row : 0;
    const bool own = small[i].rank == rank;
    (own ? packed.my_pieces : packed.their_pieces).push_back(small[i].piece);
    (own ? packed.my_places : packed.their_places)
        .push_back(place(packed.all, begin + offsets[i], small[i].piece));
  }
  packed_.push_back(std::move(packed));
}

int64_t ParameterGather::buffer_bytes() const {
  int64_t bytes = 0;
  for (const Packed& packed : packed_) bytes += packed.all.numel();
  return bytes;
}

void ParameterGather::run() {
  const at::NoGradGuard no_grad;
  for (Packed& packed : packed_) {
    if (!packed.my_pieces.empty()) {
      at::_foreach_copy_(packed.my_places, packed.my_pieces);
    }
    if (packed.source < 0) {
      all_gather_into_tensor(packed.all, packed.mine, {.group = group_});
    } else {
      broadcast(packed.all, packed.source, {.group = group_});
    }
    if (!packed.their_pieces.empty()) {
      at::_foreach_copy_(packed.their_pieces, packed.their_places);
    }
  }
  for (InPlace& each : in_place_) {
    all_gather_into_tensor(each.all, each.mine, {.group = group_});
  }
  for (Broadcast& each : broadcasts_) {
    broadcast(each.parameter, each.source, {.group = group_});
  }
}

SharedParameters::SharedParameters(const std::vector<at::Tensor>& parameters,
                                   const ProcessGroupPtr& group)
    : group_(group), generation_(inside(group).flight()) {
  const at::NoGradGuard no_grad;
  if (group->size() == 1 || inside(group).is_apart()) return;
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.device().is_cpu()) {
      throw std::invalid_argument(
          c10::str("shared_parameters: a parameter is on ", parameter.device(),
                   "; ranks can share only memory of the CPU; use "
                   "shared_parameters = false"));
    }
    if (!parameter.is_non_overlapping_and_dense()) {
      throw std::invalid_argument(c10::str(
          "shared_parameters: a parameter of sizes ", parameter.sizes(),
          " and strides ", parameter.strides(),
          " has gaps or overlaps in its memory; make it contiguous, or use "
          "shared_parameters = false"));
    }
    offsets.push_back(bytes);
    bytes +=
        (static_cast<int64_t>(parameter.nbytes()) + kParameterAlignment - 1) /
        kParameterAlignment * kParameterAlignment;
  }
  refuse_overlaps(parameters);
  HostSharing* sharing = host_sharing(group);
  if (!sharing) {
    throw std::invalid_argument(
        "shared_parameters: the process group has no memory that all its ranks "
        "share; that needs ranks of one host and the backend \"lockstep\" (or "
        "\"shm\") for the CPU. Otherwise use shared_parameters = false");
  }
  at::Tensor block;
  run_step(Call("zeros_in_common", group, group->timeout()), [&] {
    block = sharing->zeros_in_common(
        bytes, at::TensorOptions().dtype(at::kByte), group->timeout());
  });
  run_step(Call("split_barrier", group, group->timeout()),
           [&] { barrier_ = sharing->split_barrier(group->timeout()); });
  std::vector<at::Tensor> moved;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    const auto item = static_cast<int64_t>(parameter.element_size());
    at::Tensor place = at::empty({0}, parameter.options().requires_grad(false));
    place.set_(block.storage(),
               block.storage_offset() / item + offsets[i] / item,
               parameter.sizes(), parameter.strides());
    if (group->rank() == 0) place.copy_(parameter);
    moved.push_back(std::move(place));
  }
  barrier_->arrive();
  barrier_->wait(group->timeout());
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].set_data(moved[i]);
  }
}

void SharedParameters::begin_step() {
  if (!barrier_) return;
  wait();
  barrier_->arrive();
  wait();
}

void SharedParameters::end_step() {
  if (barrier_) barrier_->arrive();
}

void SharedParameters::wait() {
  if (!barrier_ || generation_.lock() != inside(group_).flight()) return;
  Span span("zero", "wait");
  const auto begun = Deadline::after(group_->timeout());
  try {
    barrier_->wait(group_->timeout());
  } catch (const c10::DistError& error) {
    Call("step of shared parameters", group_, group_->timeout())
        .fail(begun, error);
  }
}

}  // namespace lockstep::internal
