#include "lockstep/cli/doctor/limits.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/cli/size_text.h"
#include "lockstep/launch/process/control_groups.h"
#include "lockstep/launch/process/system_file.h"

namespace lockstep::internal {
namespace {

// A rank has open some 30 files and sockets at least, one more for each rank on
// another host, and all files of a folder of snapshots while it loads one.
constexpr int64_t kFewFiles = 1024;
constexpr int64_t kTooFewFiles = 32;
// A rank has at least four threads, and one more for each core that it computes
// on and for each worker of its loaders.
constexpr int64_t kFewProcesses = 1024;
constexpr int64_t kTooFewProcesses = 16;

// A limit of this process; nothing means unlimited.
struct Limit {
  std::optional<int64_t> soft;
  std::optional<int64_t> hard;  // the user may raise the soft one to this
};

Limit limit_of(__rlimit_resource resource) {
  rlimit both{};
  if (getrlimit(resource, &both) != 0) return {};
  const auto value = [](rlim_t limit) {
    return limit == RLIM_INFINITY ? std::nullopt
                                  : std::optional(static_cast<int64_t>(limit));
  };
  return {value(both.rlim_cur), value(both.rlim_max)};
}

std::string text_of(const std::optional<int64_t>& limit) {
  return limit ? std::to_string(*limit) : "unlimited";
}

std::string bytes_text(const std::optional<int64_t>& limit) {
  return limit ? size_text(*limit) : "unlimited";
}

nlohmann::ordered_json number_or_null(const std::optional<int64_t>& limit) {
  return limit ? nlohmann::ordered_json(*limit) : nullptr;
}

// Returns how to raise a limit to `wanted` (nothing: unlimited), with the
// option of ulimit and the name that systemd has for it.
std::string remedy(const Limit& limit, std::optional<int64_t> wanted,
                   const std::string& option, const std::string& systemd) {
  const std::string command =
      "Before lockstep run: ulimit " + option + " " + text_of(wanted);
  if (!limit.hard || (wanted && *limit.hard >= *wanted)) return command + ".";
  return command + ". The hard limit is " + std::to_string(*limit.hard) +
         ", and only root raises that: /etc/security/limits.conf, docker "
         "--ulimit, systemd " +
         systemd + "=.";
}

Finding check_open_files() {
  Finding finding{.name = "open files"};
  const Limit limit = limit_of(RLIMIT_NOFILE);
  finding.values = {{"limit", number_or_null(limit.soft)},
                    {"hard_limit", number_or_null(limit.hard)}};
  finding.found = text_of(limit.soft) + " in a process";
  if (!limit.soft || *limit.soft >= kFewFiles) return finding;
  const std::string what = remedy(limit, 65'536, "-n", "LimitNOFILE");
  if (*limit.soft < kTooFewFiles) {
    finding.fail("A rank opens more files and sockets than that. " + what);
  } else {
    finding.warn(
        "Jobs on many hosts and folders of snapshots of many ranks need "
        "more. " +
        what);
  }
  return finding;
}

Finding check_processes(const MachineRoots& roots) {
  Finding finding{.name = "processes"};
  const Limit limit = limit_of(RLIMIT_NPROC);
  const auto group = thread_limit(roots.control_groups());
  finding.values = {{"limit", number_or_null(limit.soft)},
                    {"hard_limit", number_or_null(limit.hard)},
                    {"group_limit", nullptr},
                    {"group_left", nullptr}};
  finding.found = text_of(limit.soft) + " processes and threads of this user";
  // The user's limit, however many run already, or what the group has left.
  std::optional<int64_t> fewest = limit.soft;
  if (group) {
    finding.values["group_limit"] = group->limit;
    finding.values["group_left"] = group->left();
    finding.found += "; a control group has " + std::to_string(group->left()) +
                     " left of " + std::to_string(group->limit);
    fewest = fewest ? std::min(*fewest, group->left()) : group->left();
  }
  if (!fewest || *fewest >= kFewProcesses) return finding;
  const std::string need =
      "A rank has at least four threads, and more for cores and loaders. ";
  const std::string what =
      fewest == limit.soft
          ? remedy(limit, 65'536, "-u", "LimitNPROC")
          : "Raise the limit of the control group: docker "
            "--pids-limit, podPidsLimit of Kubernetes' kubelet, "
            "systemd TasksMax=.";
  finding.advise(*fewest < kTooFewProcesses ? Health::fail : Health::warn,
                 need + what);
  return finding;
}

Finding check_file_size() {
  Finding finding{.name = "file size"};
  const Limit limit = limit_of(RLIMIT_FSIZE);
  finding.values = {{"limit_bytes", number_or_null(limit.soft)}};
  finding.found = bytes_text(limit.soft);
  if (limit.soft) {
    finding.warn("No snapshot and no shared memory of ranks can be larger. " +
                 remedy(limit, std::nullopt, "-f", "LimitFSIZE"));
  }
  return finding;
}

Finding check_locked_memory(const MachineRoots& roots) {
  Finding finding{.name = "locked memory"};
  const Limit limit = limit_of(RLIMIT_MEMLOCK);
  const size_t adapters = names_in(roots.sys / "class/infiniband").size();
  finding.values = {{"limit_bytes", number_or_null(limit.soft)},
                    {"rdma_adapters", adapters}};
  finding.found = bytes_text(limit.soft);
  if (limit.soft && adapters > 0) {
    finding.found += ", with RDMA adapters";
    finding.warn("NCCL and MPI lock the memory that these adapters send. " +
                 remedy(limit, std::nullopt, "-l", "LimitMEMLOCK"));
  }
  return finding;
}

Finding check_core_files(const MachineRoots& roots) {
  Finding finding{.name = "core files"};
  const Limit limit = limit_of(RLIMIT_CORE);
  const auto pattern = first_line(roots.proc / "sys/kernel/core_pattern");
  finding.values = {
      {"limit_bytes", number_or_null(limit.soft)},
      {"pattern", pattern ? nlohmann::ordered_json(*pattern) : nullptr}};
  // A program that the pattern names gets the core whatever the limit is.
  const bool piped = pattern && pattern->starts_with('|');
  if (limit.soft == 0 && !piped) {
    finding.found = "none are written; a crash leaves its stack all the same";
  } else if (piped) {
    finding.found = "go to " + pattern->substr(1, pattern->find(' ') - 1);
  } else {
    finding.found = "up to " + bytes_text(limit.soft) + " each, named " +
                    pattern.value_or("core");
  }
  return finding;
}

}  // namespace

std::vector<Finding> check_limits(const MachineRoots& roots) {
  return {check_open_files(), check_processes(roots), check_file_size(),
          check_locked_memory(roots), check_core_files(roots)};
}

}  // namespace lockstep::internal
