#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::internal {

// Files of /proc and /sys. A missing file is nothing, or an empty list.

// Returns the first line, without the newline.
std::optional<std::string> first_line(const std::filesystem::path& path);

// Returns what follows "key:" and blanks, to the end of the line; or "key" and
// another separator.
std::optional<std::string> field_of(const std::filesystem::path& path,
                                    const std::string& key,
                                    char separator = ':');

// Returns the number with which the first line begins; nothing if it begins
// with none.
std::optional<int64_t> number_in(const std::filesystem::path& path);

// Returns the bytes of a line "MemTotal:  24684084 kB" of /proc/meminfo.
std::optional<int64_t> memory_field(
    const std::string& key,
    const std::filesystem::path& path = "/proc/meminfo");

// Returns the word in brackets of "always [madvise] never".
std::optional<std::string> chosen_word(const std::filesystem::path& path);

// Returns the names of the files in a folder, sorted.
std::vector<std::string> names_in(const std::filesystem::path& folder);

// Returns the numbers of a list of CPUs or nodes such as "0-3,8", in its order;
// empty if it is no such list.
std::vector<int> numbers_of(const std::string& list);

// The time and memory that a process has used, by /proc/PID/stat.
struct ProcessUsage {
  int64_t cpu_ns = 0;  // of all its threads, in user and system mode
  int64_t resident_bytes = 0;
  char state = '?';  // "R", "S", "D", "T" (stopped), "Z"
};

// Returns nothing if there is no such process.
std::optional<ProcessUsage> usage_of(pid_t pid);

}  // namespace lockstep::internal
