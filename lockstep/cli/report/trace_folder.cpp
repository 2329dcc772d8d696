#include "lockstep/cli/report/trace_folder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "lockstep/base/whole_file.h"
#include "lockstep/cli/report/trace_scan.h"
#include "lockstep/cli/text.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> trace_paths(const std::string& folder) {
  std::error_code error;
  const fs::directory_iterator all(folder, error);
  if (error) {
    throw TraceFileError(folder + ": " + error.message() +
                         "; give the folder with the ranks' traces");
  }
  std::vector<std::string> traces;
  std::vector<std::string> others;
  for (const auto& entry : all) {
    const std::string path = entry.path().string();
    if (path.ends_with(".trace.json") || path.ends_with(".trace.json.gz")) {
      traces.push_back(path);
    } else if (path.ends_with(".json") || path.ends_with(".json.gz")) {
      others.push_back(path);
    }
  }
  auto& found = traces.empty() ? others : traces;
  if (found.empty()) {
    throw TraceFileError(folder +
                         " has no trace: no file is named *.trace.json, "
                         "*.trace.json.gz or *.json");
  }
  std::ranges::sort(found);
  return found;
}

// A file that names no rank is the trace of a process alone.
void require_one_world(const std::vector<TraceFile>& files) {
  const TraceHeader& first = files.front().header;
  for (const TraceFile& file : files) {
    const TraceHeader& header = file.header;
    if (!header.has_rank && files.size() > 1) {
      throw TraceFileError(
          file.path +
          " names no rank (distributedInfo.rank), and is not the only trace; "
          "profile after init_process_group, or give one trace alone");
    }
    if (header.rank >= header.world_size) {
      throw TraceFileError(
          file.path + " is of rank " + std::to_string(header.rank) +
          " in a world of size " + std::to_string(header.world_size));
    }
    if (header.world_size != first.world_size) {
      throw TraceFileError(file.path + " is of a world of size " +
                           std::to_string(header.world_size) + ", " +
                           files.front().path + " of a world of size " +
                           std::to_string(first.world_size) +
                           "; give the traces of one job");
    }
  }
}

// `files` must be sorted.
void require_different_cycles(const std::vector<TraceFile>& files) {
  for (size_t i = 1; i < files.size(); ++i) {
    const TraceFile& before = files[i - 1];
    const TraceFile& after = files[i];
    if (before.header.rank == after.header.rank &&
        after.time.begin < before.time.end) {
      throw TraceFileError(before.path + " and " + after.path +
                           " are both of rank " +
                           std::to_string(after.header.rank) +
                           " and of the same time; give one trace for each "
                           "rank and cycle");
    }
  }
  std::map<std::pair<int, int64_t>, const TraceFile*> owners;
  for (const TraceFile& file : files) {
    for (const auto& [number, time] : file.steps) {
      const auto [owner, is_new] =
          owners.emplace(std::pair(file.header.rank, number), &file);
      if (!is_new) {
        throw TraceFileError(owner->second->path + " and " + file.path +
                             " both have step " + std::to_string(number) +
                             " of rank " + std::to_string(file.header.rank) +
                             "; give the traces of one run");
      }
    }
  }
}

// Returns the time of what the report counts. A profiler's marks of its own
// begin before it and end after it.
Interval counted_time(const TraceFile& file) {
  std::vector<Interval> times;
  for (const TraceThread& thread : file.threads) {
    for (const TraceActivity& each : thread.activities) {
      times.push_back(each.time);
    }
  }
  const Intervals all = united(std::move(times));
  return all.empty() ? file.time : Interval{all.front().begin, all.back().end};
}

// Makes one step of each file that has none. Its number is below 0, so that it
// is not taken for a step of the program, and the same on all ranks.
void complete_steps(TraceFolder& folder) {
  std::map<int, int64_t> cycles;
  for (TraceFile& file : folder.files) {
    const int64_t cycle = cycles[file.header.rank]++;
    if (!file.steps.empty()) continue;
    file.steps.emplace(-1 - cycle, counted_time(file));
    folder.warnings.push_back(file.path +
                              " has no steps (ProfilerStep#): all of it counts "
                              "as one; give the profiler a schedule, and call "
                              "its step() after each iteration");
  }
}

}  // namespace

TraceFolder read_trace_folder(const std::string& path) {
  TraceFolder folder;
  folder.path = path;
  std::string empty;
  for (const auto& each : trace_paths(path)) {
    TraceFile file = read_trace_file(each);
    if (file.header.merged) continue;
    if (file.events == 0) {
      empty = each;
      folder.warnings.push_back(each + " has no events; it is left out");
      continue;
    }
    folder.files.push_back(std::move(file));
  }
  if (folder.files.empty()) {
    throw TraceFileError(
        empty.empty()
            ? path + " has only merged traces; give the ranks' own"
            : empty + " has no events, and " + path +
                  " no other trace; did the profiler's schedule reach its "
                  "active steps?");
  }
  require_one_world(folder.files);
  folder.world_size = folder.files.front().header.world_size;
  std::ranges::sort(folder.files, {}, [](const TraceFile& file) {
    return std::pair(file.header.rank, file.time.begin);
  });
  require_different_cycles(folder.files);
  complete_steps(folder);
  for (int rank = 0; rank < folder.world_size; ++rank) {
    const bool has_trace = std::ranges::any_of(
        folder.files,
        [&](const TraceFile& file) { return file.header.rank == rank; });
    (has_trace ? folder.ranks : folder.missing).push_back(rank);
  }
  return folder;
}

namespace {

using nlohmann::json;

// Returns the file that `path` names, which may be a chain of symbolic links to
// one that does not exist yet.
std::string behind_links(const std::string& path) {
  constexpr int kMostLinks = 40;  // as Linux
  fs::path file = path;
  std::error_code error;
  for (int i = 0; i < kMostLinks && fs::is_symlink(file, error); ++i) {
    const fs::path target = fs::read_symlink(file, error);
    if (error) break;
    file = file.parent_path() / target;
  }
  return file;
}

// A file that appears at its path with commit(). A pipe or a device is opened
// and written as it is.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path)
      : path_(path),
        through_(is_written_through(path)),
        target_(through_ ? path : behind_links(path)),
        opened_(through_
                    ? path
                    : target_ + "." + std::to_string(::getpid()) + ".part"),
        file_(std::fopen(opened_.c_str(), through_ ? "abe" : "wbe")) {
    if (!file_) fail();
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile() {
    if (file_) remove_part();
  }

  void write(const std::string& text) {
    if (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size()) {
      fail();
    }
  }
  void commit() {
    if (std::fflush(file_.get()) != 0) fail();
    if (!through_ && std::rename(opened_.c_str(), target_.c_str()) != 0) fail();
    file_.reset();
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void remove_part() const {
    if (!through_) ::unlink(opened_.c_str());
  }
  [[noreturn]] void fail() const {
    const int error = errno;
    if (file_) remove_part();
    throw TraceFileError(path_ + " cannot be written: " +
                         std::generic_category().message(error));
  }

  std::string path_;
  bool through_;
  std::string target_;
  std::string opened_;
  std::unique_ptr<std::FILE, Close> file_;
};

// Returns "12.345" for 12345 ns.
std::string microseconds(int64_t nanoseconds) {
  return format("%lld.%03d", static_cast<long long>(nanoseconds / 1000),
                static_cast<int>(nanoseconds % 1000));
}

// Returns what a process is, apart from its rank: "GPU 0", "Spans".
std::string description(const TraceProcess& process) {
  if (!process.labels.empty()) return process.labels;
  std::string name = process.name.empty() ? process.id : process.name;
  std::erase(name, '"');
  return name.empty() ? "trace" : name;  // Kineto's marks of its own have ""
}

// The processes of all ranks under new numbers.
class ProcessNumbers {
 public:
  explicit ProcessNumbers(const TraceFolder& folder) {
    // The numbers of a rank begin with a multiple of step_, which is a power of
    // ten, so that ranks can be told apart at sight. 0 would be the idle
    // process.
    std::map<int, std::set<std::string>> ids;
    size_t most = 0;
    for (const TraceFile& file : folder.files) {
      auto& own = ids[file.header.rank];
      for (const auto& process : file.processes) own.insert(process.id);
      most = std::max(most, own.size());
    }
    while (step_ < static_cast<int64_t>(most)) step_ *= 10;
    for (const TraceFile& file : folder.files) add(file);
  }

  int64_t number(int rank, const std::string& process) const {
    return numbers_.at({rank, process}).number;
  }
  // Returns the events that name and sort the processes.
  std::vector<std::string> name_events() const {
    std::vector<std::string> events;
    for (const auto& [key, process] : numbers_) {
      for (const json& event :
           {json{{"name", "process_name"},
                 {"ph", "M"},
                 {"pid", process.number},
                 {"tid", 0},
                 {"args", {{"name", process.name}}}},
            json{{"name", "process_sort_index"},
                 {"ph", "M"},
                 {"pid", process.number},
                 {"tid", 0},
                 {"args", {{"sort_index", process.number}}}}}) {
        events.push_back(
            event.dump(-1, ' ', false, json::error_handler_t::replace));
      }
    }
    return events;
  }

 private:
  struct Process {
    int64_t number = 0;
    std::string name{};
  };

  void add(const TraceFile& file) {
    const int rank = file.header.rank;
    std::string rank_name = "rank " + std::to_string(rank);
    if (!file.header.host.empty()) rank_name += " (" + file.header.host + ")";
    // The rank's own process is the first of the rank.
    const size_t own = file.own_process();
    std::vector<size_t> order{own};
    for (size_t i = 0; i < file.processes.size(); ++i) {
      if (i != own) order.push_back(i);
    }
    for (const size_t i : order) {
      const TraceProcess& process = file.processes[i];
      const int64_t number = (rank + 1) * step_ + used_[rank];
      const auto [unused, is_new] = numbers_.emplace(
          std::pair(rank, process.id),
          Process{number, i == own ? rank_name
                                   : rank_name + ": " + description(process)});
      if (is_new) ++used_[rank];
    }
  }

  int64_t step_ = 10;
  std::map<std::pair<int, std::string>, Process> numbers_;
  std::map<int, int64_t> used_;
};

// Returns an id that no other file has.
std::string id_in_file(const std::string& id, size_t file, size_t files) {
  constexpr size_t kMostDigits = 12;
  if (!id.starts_with('"') && id.size() <= kMostDigits &&
      id.find_first_not_of("0123456789") == id.npos) {
    return std::to_string(std::stoll(id) * static_cast<int64_t>(files) +
                          static_cast<int64_t>(file));
  }
  const std::string text = id.starts_with('"') ? id.substr(1) : id + '"';
  return "\"" + std::to_string(file) + ":" + text;
}

void require_no_trace(const TraceFolder& folder, const std::string& path) {
  for (const TraceFile& file : folder.files) {
    std::error_code ignored;
    if (fs::equivalent(file.path, path, ignored)) {
      throw TraceFileError(path +
                           " is one of the traces; give --output another name");
    }
  }
}

}  // namespace

void write_merged_trace(const TraceFolder& folder, const std::string& path) {
  require_no_trace(folder, path);
  const ProcessNumbers processes(folder);
  int64_t base = folder.files.front().time.begin;
  for (const TraceFile& file : folder.files) {
    base = std::min(base, file.time.begin);
  }
  OutputFile output(path);
  output.write("{\"lockstep\":{\"version\":1,\"merged\":true,\"world_size\":" +
               std::to_string(folder.world_size) +
               ",\"ranks\":" + json(folder.ranks).dump() +
               "},\n\"schemaVersion\":1,\"displayTimeUnit\":\"ms\","
               "\"baseTimeNanoseconds\":" +
               std::to_string(base) + ",\n\"traceEvents\":[");
  const char* separator = "\n";
  const auto write_event = [&](const std::string& event) {
    output.write(separator + event);
    separator = ",\n";
  };
  for (const auto& event : processes.name_events()) write_event(event);
  std::string text;
  for (size_t i = 0; i < folder.files.size(); ++i) {
    const TraceFile& file = folder.files[i];
    const int64_t shift =
        file.header.base_ns + file.header.clock_offset_ns - base;
    scan_trace(file.path, true, [&](const TraceEvent& event) {
      if (event.phase == "M" && (event.name == "process_name" ||
                                 event.name == "process_sort_index")) {
        return;
      }
      text = "{" + event.rest + (event.rest.empty() ? "" : ",") + "\"pid\":" +
             std::to_string(processes.number(file.header.rank, event.process)) +
             ",\"tid\":" + (event.thread.empty() ? "0" : event.thread);
      if (event.has_time) {
        // Metadata may be of no time, which Kineto writes as 0.
        text += ",\"ts\":" +
                microseconds(std::max<int64_t>(event.begin_ns + shift, 0));
      }
      if (!event.id.empty()) {
        text += ",\"id\":" + id_in_file(event.id, i, folder.files.size());
      }
      write_event(text + "}");
    });
  }
  output.write("\n]}\n");
  output.commit();
}

}  // namespace lockstep::internal
