#include "benchmarks/ddp_step/trace.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <variant>

namespace benchmarks {
namespace {

int64_t nanoseconds(std::chrono::steady_clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

// In ascending order; no two of them touch.
using Intervals = std::vector<std::pair<int64_t, int64_t>>;

template <typename Predicate>
Intervals united(const std::vector<RecordedSpan>& spans, Predicate counts) {
  Intervals result;
  for (const auto& span : spans) {  // in the order of their begin
    if (!counts(span)) continue;
    if (!result.empty() && span.begin_ns <= result.back().second) {
      result.back().second = std::max(result.back().second, span.end_ns);
    } else {
      result.emplace_back(span.begin_ns, span.end_ns);
    }
  }
  return result;
}

Intervals intersection(const Intervals& a, const Intervals& b) {
  Intervals result;
  for (auto i = a.begin(), j = b.begin(); i != a.end() && j != b.end();) {
    const auto begin = std::max(i->first, j->first);
    const auto end = std::min(i->second, j->second);
    if (begin < end) result.emplace_back(begin, end);
    i->second < j->second ? ++i : ++j;
  }
  return result;
}

int64_t length(const Intervals& intervals) {
  int64_t sum = 0;
  for (const auto& [begin, end] : intervals) sum += end - begin;
  return sum;
}

}  // namespace

SpanRecorder::SpanRecorder(size_t capacity)
    : begins_(capacity), ends_(capacity) {}

void SpanRecorder::on_begin(
    const lockstep::internal::SpanBegin& begin) noexcept {
  const size_t slot = begun_.fetch_add(1, std::memory_order_relaxed);
  if (slot >= begins_.size()) return;
  auto& [id, span] = begins_[slot];
  id = begin.id;
  span.category = begin.category;
  span.name = begin.name;
  for (const auto& [key, value] : begin.attributes) {
    if (const auto* number = std::get_if<int64_t>(&value)) {
      span.numbers.emplace_back(key, *number);
    }
  }
  span.begin_ns = nanoseconds(begin.time);
}

void SpanRecorder::on_end(const lockstep::internal::SpanEnd& end) noexcept {
  const size_t slot = ended_.fetch_add(1, std::memory_order_relaxed);
  if (slot < ends_.size()) ends_[slot] = {end.id, nanoseconds(end.time)};
}

std::vector<RecordedSpan> SpanRecorder::spans() const {
  std::unordered_map<uint64_t, int64_t> ends;
  for (size_t i = 0; i < std::min(ended_.load(), ends_.size()); ++i) {
    ends.emplace(ends_[i].id, ends_[i].time_ns);
  }
  std::vector<RecordedSpan> result;
  for (size_t i = 0; i < std::min(begun_.load(), begins_.size()); ++i) {
    const auto end = ends.find(begins_[i].id);
    if (end == ends.end()) continue;
    result.push_back(begins_[i].span);
    result.back().end_ns = end->second;
  }
  std::ranges::stable_sort(result, {}, &RecordedSpan::begin_ns);
  return result;
}

Overlap overlap(const std::vector<RecordedSpan>& spans) {
  const auto communication =
      united(spans, [](const RecordedSpan& s) { return s.category == "comm"; });
  const auto backward = united(spans, [](const RecordedSpan& s) {
    return s.category == "train" && s.name == "backward";
  });
  const auto waits =
      united(spans, [](const RecordedSpan& s) { return s.name == "wait"; });
  const auto within = intersection(communication, backward);
  return {.communication_ns = length(communication),
          .hidden_ns = length(within) - length(intersection(within, waits)),
          .waited_ns = length(waits)};
}

nlohmann::json trace_events(const std::vector<RecordedSpan>& spans, int rank) {
  struct Line {
    int number;
    int64_t busy_until;
  };
  std::map<std::string, std::vector<Line>> lines;  // by category
  auto events = nlohmann::json::array();
  const auto name = [&](const char* what, int line, const std::string& text) {
    events.push_back({{"ph", "M"},
                      {"name", what},
                      {"pid", rank},
                      {"tid", line},
                      {"args", {{"name", text}}}});
  };
  name("process_name", 0, "rank " + std::to_string(rank));
  int number = 0;
  for (const auto& span : spans) {
    auto& own = lines[span.category];
    auto line = std::ranges::find_if(own, [&](const Line& each) {
      return each.busy_until <= span.begin_ns;
    });
    if (line == own.end()) {
      line = own.insert(line, Line{number++, 0});
      name("thread_name", line->number, span.category);
    }
    line->busy_until = span.end_ns;
    nlohmann::json event = {
        {"ph", "X"},
        {"cat", span.category},
        {"name", span.name},
        {"pid", rank},
        {"tid", line->number},
        {"ts", static_cast<double>(span.begin_ns) / 1000},  // microseconds
        {"dur", static_cast<double>(span.end_ns - span.begin_ns) / 1000}};
    for (const auto& [key, value] : span.numbers) event["args"][key] = value;
    events.push_back(std::move(event));
  }
  return events;
}

}  // namespace benchmarks
