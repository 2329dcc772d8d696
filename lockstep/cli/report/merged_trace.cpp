#include "lockstep/cli/report/merged_trace.h"

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

#include "lockstep/base/write_aside.h"
#include "lockstep/cli/format.h"
#include "lockstep/cli/report/trace_file_error.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;
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
