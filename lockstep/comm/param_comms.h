#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/buffers.h"
#include "lockstep/comm/collective_call.h"

namespace lockstep::internal {

// One call of a group's operation, as c10d describes it to profilers, which get
// c10d's name of the operation.
struct CommsCall {
  const Call& call;
  Buffers::Extent extent{};
  bool async_op = false;
  // How many elements go to each rank and come from each; empty means equally
  // many.
  std::vector<int64_t> in_splits{};
  std::vector<int64_t> out_splits{};
  std::vector<at::Tensor> inputs{};
  std::vector<at::Tensor> outputs{};
};

// While it exists, LibTorch's profilers see a "record_param_comms" event with
// the arguments that ProcessGroupNCCL gives it (RECORD_PARAM_COMMS_DATA in
// torch/csrc/distributed/c10d/ParamCommsUtils.hpp), so that Python's trace
// tools find operation, dtype, sizes and group. Begins and ends in one thread:
// an asynchronous operation is seen while it is started. Internal to comm.
//
// It does not observe Operation, because it ends when the call returns, which
// may be before the operation ends, shows each bucket of a reduction, which is
// one operation, and shows tensors, which Operation does not know.
class ParamComms {
 public:
  // Calls `describe`, which returns a std::optional<CommsCall>, only if a
  // profiler records. It sees nothing of the operation if there is no value.
  template <typename Describe>
  explicit ParamComms(Describe&& describe) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    if (!callbacks) return;
    const std::optional<CommsCall> call = describe();
    if (call) begin(std::move(*callbacks), *call);
  }
  ParamComms(const ParamComms&) = delete;
  ParamComms& operator=(const ParamComms&) = delete;

 private:
  void begin(at::StepCallbacks&& callbacks, const CommsCall& seen);

  // The profiler reads it when function_ ends, too.
  std::optional<c10::DebugInfoGuard> info_{};
  std::optional<at::RecordFunction> function_{};
};

}  // namespace lockstep::internal
