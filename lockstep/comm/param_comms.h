#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// One call of a group's operation, as c10d describes it to profilers.
struct CommsCall {
  const char* operation;  // "all_reduce"; profilers get c10d's name of it
  const ProcessGroup& group;
  uint64_t number = 0;  // of the collective; 0 for a message
  int peer = -1;        // root or peer, as a rank of the default group, or -1
  bool async_op = false;
  at::ScalarType dtype = at::kByte;
  // How many elements this rank gives, and how many it gets.
  int64_t in_elements = 0;
  int64_t out_elements = 0;
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
  void begin(at::StepCallbacks&& callbacks, const CommsCall& call);

  // The profiler reads it when function_ ends, too.
  std::optional<c10::DebugInfoGuard> info_{};
  std::optional<at::RecordFunction> function_{};
};

}  // namespace lockstep::internal
