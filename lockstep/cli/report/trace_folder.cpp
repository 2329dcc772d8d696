#include "lockstep/cli/report/trace_folder.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>

#include "lockstep/cli/report/trace_file_error.h"

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

}  // namespace lockstep::internal
