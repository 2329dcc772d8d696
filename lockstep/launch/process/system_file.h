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

// Where this process's control groups are: the file systems' root, and the file
// that names the groups of the process.
struct ControlGroupPlace {
  std::filesystem::path root = "/sys/fs/cgroup";
  std::filesystem::path membership = "/proc/self/cgroup";
};

// A group of which this process is a member.
struct ControlGroup {
  std::filesystem::path folder;
  bool version_1;
};

// Returns the groups that may limit what `controller` ("cpu", "memory", "pids")
// gives to this process: in each hierarchy that has it the process's own group,
// then the groups around that one, out to the root. Empty if there are none.
std::vector<ControlGroup> control_groups(const std::string& controller,
                                         const ControlGroupPlace& place = {});

// A limit, and how much of it is used.
struct GroupLimit {
  int64_t limit = 0;
  // The memory that all processes of that group use. Memory that the kernel
  // would give back (pages of files that were not read lately) does not count.
  int64_t used = 0;
  int64_t left() const { return limit > used ? limit - used : 0; }
};

// Both return the limit that leaves the least: of memory in bytes, of processes
// and threads by their number. Nothing if no group has a limit.
std::optional<GroupLimit> memory_limit(const ControlGroupPlace& place = {});
std::optional<GroupLimit> thread_limit(const ControlGroupPlace& place = {});

// Returns how many processes of this process's control group the kernel has
// killed since the group was made, because memory had run out; 0 if no group
// counts them.
int64_t oom_kills(const ControlGroupPlace& place = {});

}  // namespace lockstep::internal
