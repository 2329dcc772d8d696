#include "lockstep/cli/report/trace_file.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "lockstep/cli/report/trace_events.h"
#include "lockstep/cli/report/trace_scan.h"

namespace lockstep::internal {
namespace {

// Collects the events of a file.
class TraceCollector {
 public:
  explicit TraceCollector(TraceFile& file) : file_(file) {}

  void add(const TraceEvent& event) {
    TraceProcess& owner = process(event.process);
    if (event.phase == "M") {
      if (event.name == "process_name") owner.name = event.named;
      if (event.name == "process_labels") owner.labels = event.labels;
    } else if (event.has_time) {
      add_timed(event, owner);
    }
  }

  // Sorts the activities and makes all times those of the aligned clock.
  void finish() {
    const int64_t shift = file_.header.base_ns + file_.header.clock_offset_ns;
    const auto move = [&](Interval& time) {
      time.begin += shift;
      time.end += shift;
    };
    if (file_.events > 0) move(file_.time);
    for (TraceThread& thread : file_.threads) {
      for (TraceActivity& each : thread.activities) move(each.time);
      std::ranges::sort(thread.activities, [](const auto& a, const auto& b) {
        return a.time.begin != b.time.begin ? a.time.begin < b.time.begin
                                            : a.time.end > b.time.end;
      });
    }
    for (auto& [number, time] : file_.steps) move(time);
    require_steps_apart();
  }

 private:
  TraceProcess& process(const std::string& id) {
    const auto [found, is_new] =
        process_index_.emplace(id, file_.processes.size());
    if (is_new) file_.processes.push_back({.id = id});
    return file_.processes[found->second];
  }
  TraceThread& thread(const TraceEvent& event) {
    const auto [found, is_new] = thread_index_.emplace(
        event.process + " " + event.thread, file_.threads.size());
    if (is_new) {
      file_.threads.push_back({is_device_category(event.category), {}});
    }
    return file_.threads[found->second];
  }

  void add_timed(const TraceEvent& event, TraceProcess& owner) {
    const Interval time{event.begin_ns, event.begin_ns + event.duration_ns};
    file_.time = file_.events == 0
                     ? time
                     : Interval{std::min(file_.time.begin, time.begin),
                                std::max(file_.time.end, time.end)};
    ++file_.events;
    if (event.phase != "X") return;
    const Activity activity = activity_of(event.name, event.category);
    if (activity == Activity::none) return;
    ++owner.activities;
    if (activity == Activity::step) {
      add_step(event, time);
    } else {
      thread(event).activities.push_back(
          {time, activity, event.flops, name(event.name)});
      if (event.flops == 0 && is_convolution(event.name)) {
        ++file_.uncounted_convolutions;
      }
    }
  }

  uint32_t name(const std::string& text) {
    const auto [found, is_new] =
        name_index_.emplace(text, static_cast<uint32_t>(file_.names.size()));
    if (is_new) file_.names.push_back(text);
    return found->second;
  }

  void add_step(const TraceEvent& event, Interval time) {
    const std::string_view digits =
        std::string_view(event.name).substr(event.name.find('#') + 1);
    int64_t number = 0;
    const auto* end = digits.data() + digits.size();
    const auto read = std::from_chars(digits.data(), end, number);
    if (read.ec != std::errc() || read.ptr != end || number < 0) return;
    if (!file_.steps.emplace(number, time).second) {
      throw TraceFileError(file_.path + " has step " + std::to_string(number) +
                           " twice; a step is one ProfilerStep# event");
    }
  }

  void require_steps_apart() const {
    std::vector<std::pair<Interval, int64_t>> in_time;
    for (const auto& [number, time] : file_.steps) {
      in_time.emplace_back(time, number);
    }
    std::ranges::sort(in_time, {},
                      [](const auto& step) { return step.first.begin; });
    for (size_t i = 1; i < in_time.size(); ++i) {
      if (in_time[i].first.begin < in_time[i - 1].first.end) {
        throw TraceFileError(
            file_.path + ": step " + std::to_string(in_time[i].second) +
            " begins before step " + std::to_string(in_time[i - 1].second) +
            " has ended");
      }
    }
  }

  TraceFile& file_;
  std::unordered_map<std::string, size_t> process_index_;
  std::unordered_map<std::string, size_t> thread_index_;
  std::unordered_map<std::string, uint32_t> name_index_;
};

}  // namespace

bool TraceFile::has_device() const {
  return std::ranges::any_of(threads, [](const TraceThread& thread) {
    return thread.on_device && !thread.activities.empty();
  });
}

size_t TraceFile::own_process() const {
  const std::string pid = std::to_string(header.pid);
  size_t own = 0;
  for (size_t i = 0; i < processes.size(); ++i) {
    if (header.pid != 0 && processes[i].id == pid) return i;
    // The GPUs' processes have few other events than kernels, but those may be
    // many.
    const bool is_device = processes[i].labels.starts_with("GPU");
    if (!is_device && processes[i].activities > processes[own].activities) {
      own = i;
    }
  }
  return own;
}

TraceFile read_trace_file(const std::string& path) {
  TraceFile file;
  file.path = path;
  TraceCollector collector(file);
  file.header = scan_trace(
      path, false, [&](const TraceEvent& event) { collector.add(event); });
  collector.finish();
  return file;
}

}  // namespace lockstep::internal
