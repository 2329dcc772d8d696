#pragma once

#include <ATen/ThreadLocalState.h>

#include <memory>

namespace lockstep::internal {

// The modes of the thread that makes this object, for other threads that work
// for it: what Autocast, NoGradGuard and InferenceMode set.
class LoopModes {
 public:
  // Gives the thread these modes until it ends.
  class Guard {
   public:
    explicit Guard(const LoopModes& modes) : guard_(modes.state_) {
      // A profiler of the loop's thread may end before the pass does, so this
      // thread keeps its own.
      at::set_record_function_tls_(own_callbacks_);
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(own_profiler_);
    }

   private:
    const at::RecordFunctionTLS own_callbacks_ = at::get_record_function_tls_();
    const std::shared_ptr<c10::ThreadLocalDebugInfo> own_profiler_ =
        c10::ThreadLocalDebugInfo::current();
    const at::ThreadLocalStateGuard guard_;
  };

 private:
  at::ThreadLocalState state_;
};

}  // namespace lockstep::internal
