#include "lockstep/parallel/zero/shared_parameters.h"

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/collective_call.h"
#include "lockstep/comm/collective_work.h"
#include "lockstep/trace/span.h"

namespace lockstep::internal {
namespace {

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

SharedParameters::SharedParameters(const std::vector<at::Tensor>& parameters,
                                   const ProcessGroupPtr& group)
    : group_(group) {
  const at::NoGradGuard no_grad;
  if (group->size() == 1) return;
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
  if (!barrier_) return;
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
