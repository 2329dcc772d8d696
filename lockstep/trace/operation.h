#pragma once

#include <cstdint>
#include <initializer_list>
#include <utility>

#include "lockstep/trace/flight_recorder.h"
#include "lockstep/trace/span.h"

namespace lockstep::internal {

// One operation of a group on this rank, from its begin to its end: a
// collective, a message or a reduction of buckets. Code that runs an operation
// makes one of these and records nothing by itself. All that records operations
// observes them here: the group's flight recorder, which dumps and the status
// board read, and the observers of spans.
//
// It moves with the work that it describes and may end in another thread. Only
// one thread at a time may call. It takes no lock and allocates nothing unless
// spans are observed. `recorder` must live until end().
class Operation {
 public:
  // The spans that observers see.
  enum class Spans : uint8_t {
    none,      // the spans of its caller and its parts are enough
    nested,    // a span that ends in the function that began it
    detached,  // see Span::detached()
  };

  // `state` is scheduled or started. `bytes` are those of all tensors.
  Operation(FlightRecorder& recorder, const FlightCall& call, FlightState state,
            Spans spans, uint64_t bytes, FlightRecorder::Clock::time_point now)
      : recorder_(&recorder),
        record_(recorder.begin(call, state, now)),
        span_(begin_span(recorder.group(), call, spans, bytes)) {}
  Operation(Operation&& other) noexcept
      : recorder_(other.recorder_),
        record_(std::exchange(other.record_, 0)),
        span_(std::move(other.span_)) {}
  Operation& operator=(Operation&&) = delete;
  ~Operation() = default;

  // Says that the backend runs what was scheduled.
  void start() noexcept { recorder_->start(record_); }
  // Only the first end counts. If there is none, the flight record stays open.
  void end(bool failed) noexcept {
    recorder_->end(std::exchange(record_, 0), failed);
    span_.end(failed);
  }

  // Whether the flight recorder, or an observer of spans, waits for the end.
  bool is_recorded() const noexcept { return record_ != 0; }
  bool has_span() const noexcept { return span_.active(); }

 private:
  static Span begin_span(const FlightGroup& group, const FlightCall& call,
                         Spans spans, uint64_t bytes) {
    if (spans == Spans::none || !Span::observed()) return Span();
    const std::initializer_list<SpanAttribute> attributes{
        {"group", group.name},
        {"number", static_cast<int64_t>(call.number)},
        {"bytes", static_cast<int64_t>(bytes)},
        {"world_size", static_cast<int64_t>(group.ranks.size())}};
    return spans == Spans::detached
               ? Span::detached("comm", call.operation, attributes)
               : Span("comm", call.operation, attributes);
  }

  FlightRecorder* recorder_;
  uint64_t record_;  // 0 if it is not recorded, or has ended
  Span span_;
};

}  // namespace lockstep::internal
