#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/trace/span.h>

// Where the time of a few steps goes, from Lockstep's spans and those of the
// step loop itself ("train": load, forward, backward, optimizer).
namespace benchmarks {

struct RecordedSpan {
  std::string category;
  std::string name;
  std::vector<std::pair<std::string, int64_t>> numbers;  // its attributes
  int64_t begin_ns;  // of the steady clock, which a host's processes share
  int64_t end_ns;
};

// Remembers the spans that begin and end while it observes, without a lock.
class SpanRecorder final : public lockstep::internal::SpanObserver {
 public:
  explicit SpanRecorder(size_t capacity);  // in spans; later ones are lost

  void on_begin(const lockstep::internal::SpanBegin& begin) noexcept override;
  void on_end(const lockstep::internal::SpanEnd& end) noexcept override;

  // Returns the spans that have ended, in the order of their begin. Call it
  // when the observer is no longer subscribed.
  std::vector<RecordedSpan> spans() const;

 private:
  struct Begin {
    uint64_t id;
    RecordedSpan span;
  };
  struct End {
    uint64_t id;
    int64_t time_ns;
  };
  std::vector<Begin> begins_;
  std::vector<End> ends_;
  std::atomic<size_t> begun_{0};
  std::atomic<size_t> ended_{0};
};

// How much of a rank's communication lay within its backward passes, in
// nanoseconds.
struct Overlap {
  // Time in which a span of "comm" was under way.
  int64_t communication_ns = 0;
  // The part of that time in which backward computed: inside
  // "train"/"backward", outside every span that is called "wait".
  int64_t hidden_ns = 0;
  // Time in spans that are called "wait".
  int64_t waited_ns = 0;
};
Overlap overlap(const std::vector<RecordedSpan>& spans);

// Returns one rank's events for a file of the Trace Event Format (Google,
// "Trace Event Format", "Complete Events"), which chrome://tracing and Perfetto
// show: a process for each rank, a line for each category, and further lines if
// spans of one category overlap.
nlohmann::json trace_events(const std::vector<RecordedSpan>& spans, int rank);

}  // namespace benchmarks
