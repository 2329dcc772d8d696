#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/harness/temporary_folder.h"

// Reads what SummaryWriter writes, as far as a test without Python must.
namespace lockstep::internal::testing {

// Returns the events of a file, as bytes. Throws if it does not end with a
// whole record. (Checksums are compared by TensorBoard, in the interop test.)
inline std::vector<std::string> events_of(const std::string& path) {
  const std::string file = read_file(path);
  std::vector<std::string> events;
  for (size_t at = 0; at < file.size();) {
    uint64_t length = 0;
    if (file.size() - at < 16) throw std::runtime_error("a broken record");
    std::memcpy(&length, file.data() + at, sizeof length);
    if (file.size() - at - 16 < length) {
      throw std::runtime_error("a record that is cut short");
    }
    events.push_back(file.substr(at + 12, length));
    at += 16 + length;
  }
  return events;
}

// Returns the files below `folder`, as paths relative to it, sorted; those of
// events without what differs from run to run.
inline std::vector<std::string> files_below(const std::string& folder) {
  std::vector<std::string> files;
  if (!std::filesystem::exists(folder)) return files;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    std::string name = std::filesystem::relative(entry.path(), folder).string();
    const size_t events = name.find("events.out.tfevents.");
    if (events != std::string::npos) name.resize(events + 6);
    files.push_back(name);
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Returns the path of the one file of events in `folder` itself.
inline std::string event_file_in(const std::string& folder) {
  std::string found;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    if (!found.empty()) throw std::runtime_error("several files: " + folder);
    found = entry.path().string();
  }
  return found;
}

}  // namespace lockstep::internal::testing
