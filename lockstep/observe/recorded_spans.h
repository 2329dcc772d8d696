#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "lockstep/trace/span.h"

namespace lockstep::internal {

// Shows spans (trace/span.h) to the profilers of LibTorch as user annotations:
// a span with category "ddp" and name "wait" is "lockstep::ddp::wait". If a
// profiler records inputs, the span's attributes are keyword arguments.
// Detached spans are left out, because a thread's events must lie within each
// other.
//
// The callbacks of a profiler belong to threads: the one that has started it
// and those to which LibTorch hands its thread-local state. So a span in any
// other thread is recorded with the state of the thread that constructed this
// object, and is shown in its own thread all the same.
//
// The destructor ends the spans that are open: destroy it before a profiler
// stops.
class RecordedSpans final : public SpanObserver {
 public:
  RecordedSpans() = default;

  void on_begin(const SpanBegin& begin) noexcept override;
  void on_end(const SpanEnd& end) noexcept override;

 private:
  const at::ThreadLocalState profiled_{};
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::unique_ptr<at::RecordFunction>> open_;
};

}  // namespace lockstep::internal
