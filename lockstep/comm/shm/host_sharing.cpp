#include "lockstep/comm/host_sharing.h"

#include <ATen/ATen.h>

#include <exception>
#include <stdexcept>
#include <utility>

#include "lockstep/base/environment.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/shm/backend.h"
#include "lockstep/comm/shm/protocol/common_memory.h"
#include "lockstep/comm/shm/protocol/handshake.h"
#include "lockstep/comm/shm/protocol_call.h"
#include "lockstep/trace/current_call.h"

namespace lockstep::internal {

HostSharing* host_sharing(const ProcessGroupPtr& group) {
  const auto of = group_or_default(group);
  if (!inside(of).has_backend(c10::kCPU)) return nullptr;
  return dynamic_cast<HostSharing*>(&inside(of).backend(c10::kCPU));
}

std::optional<std::string> host_id() {
  if (auto given = get_env("LOCKSTEP_HOST_ID")) return "given " + *given;
  try {
    return shm::host_identity();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

namespace shm {
namespace {

class SharedBarrier final : public SplitBarrier {
 public:
  SharedBarrier(std::shared_ptr<Group> group, milliseconds timeout)
      : group_(std::move(group)), arrivals_(*group_, timeout) {}

  void arrive() override {
    if (!made_in_.is_foreign()) arrivals_.arrive();
  }
  void wait(milliseconds timeout) override {
    refuse_in_child(made_in_);
    CurrentCall current{.operation = "split_barrier",
                        .function = user_function()};
    const CurrentCallScope scope(&current);
    translated([&] { arrivals_.wait(timeout); });
  }

 private:
  const ProcessMark made_in_{};
  const std::shared_ptr<Group> group_;
  Arrivals arrivals_;
};

// The memory that the tensors of zeros_in_common() keep alive.
struct CommonTensor {
  std::shared_ptr<Group> group;
  CommonMemory memory;
};

}  // namespace

std::unique_ptr<SplitBarrier> Backend::split_barrier(milliseconds timeout) {
  std::unique_ptr<SplitBarrier> barrier;
  run_in_turn(timeout, [&](milliseconds left) {
    barrier = std::make_unique<SharedBarrier>(group_, left);
  });
  return barrier;
}

at::Tensor Backend::zeros_in_common(int64_t count,
                                    const at::TensorOptions& options,
                                    milliseconds timeout) {
  if (count < 0 || !options.device().is_cpu()) {
    throw std::invalid_argument(c10::str("zeros_in_common: ", count,
                                         " elements on ", options.device(),
                                         "; give 0 or more on cpu"));
  }
  const size_t bytes = static_cast<size_t>(count) * options.dtype().itemsize();
  if (bytes == 0) return at::empty({count}, options);
  std::shared_ptr<CommonTensor> held;
  run_in_turn(timeout, [&](milliseconds left) {
    held.reset(
        new CommonTensor{.group = group_, .memory = {*group_, bytes, left}});
  });
  auto* data = held->memory.data();
  shared_->add(data, bytes);
  return at::from_blob(
      data, {count},
      [held = std::move(held), shared = shared_](void* given) {
        shared->remove(given);
      },
      options);
}

}  // namespace shm
}  // namespace lockstep::internal
