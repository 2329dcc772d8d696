#include "lockstep/cli/doctor/host_checks.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "lockstep/base/control_groups.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/shared_memory.h"
#include "lockstep/base/system_file.h"
#include "lockstep/cli/text.h"
#include "lockstep/launch/process/run_directory.h"

namespace lockstep::internal {
namespace {

// Returns "1.5" or "2".
std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

}  // namespace

Finding check_cores(const MachineRoots& roots) {
  Finding finding{.name = "cores"};
  const auto mine = field_of(roots.proc / "self/status", "Cpus_allowed_list");
  const size_t usable = numbers_of(mine.value_or("")).size();
  if (usable == 0) {
    finding.found = (roots.proc / "self/status").string() +
                    " does not name the cores of this process";
    finding.warn("Mount /proc, if this is a container or a chroot.");
    return finding;
  }
  const size_t online =
      numbers_of(
          first_line(roots.sys / "devices/system/cpu/online").value_or(*mine))
          .size();
  const auto granted = granted_cores(roots.control_groups());
  const auto load = first_line(roots.proc / "loadavg");
  finding.found = std::to_string(usable) + " of the host's " +
                  std::to_string(online) + " may be used";
  finding.values = {{"online", online},
                    {"usable", usable},
                    {"granted", nullptr},
                    {"load", nullptr}};
  if (granted) {
    finding.found += ", for the time of " + short_number(*granted) +
                     " (limit of a control group)";
    finding.values["granted"] = *granted;
    if (*granted < static_cast<double>(usable)) {
      finding.warn(
          "If threads need more than that time, all stand still for the rest "
          "of each tenth of a second, and ranks wait for each other. Start at "
          "most one rank for each whole core (--nproc-per-node=cpu), or raise "
          "the limit (docker --cpus, Kubernetes limits.cpu, systemd "
          "CPUQuota=).");
    }
  }
  if (load) {
    const double one_minute = std::strtod(load->c_str(), nullptr);
    finding.found += "; load " + short_number(one_minute);
    finding.values["load"] = one_minute;
    if (one_minute > static_cast<double>(online)) {
      finding.warn(
          "More processes want to run than the host has cores, so ranks lose "
          "theirs and the others wait. Look at them with top; end them, or "
          "start fewer ranks.");
    }
  }
  return finding;
}

Finding check_numa(const MachineRoots& roots) {
  Finding finding{.name = "NUMA"};
  const auto nodes = roots.sys / "devices/system/node";
  const auto mine = numbers_of(
      field_of(roots.proc / "self/status", "Cpus_allowed_list").value_or(""));
  size_t count = 0;
  size_t usable = 0;
  std::string cores;
  for (const int node : numbers_of(first_line(nodes / "online").value_or(""))) {
    const std::string list =
        first_line(nodes / ("node" + std::to_string(node)) / "cpulist")
            .value_or("");
    if (list.empty()) continue;  // memory without cores
    ++count;
    cores += (cores.empty() ? "" : " and ") + list;
    usable += std::ranges::any_of(numbers_of(list), [&](int core) {
      return std::ranges::find(mine, core) != mine.end();
    });
  }
  finding.values = {{"nodes", count}, {"usable", usable}};
  if (count < 2) {  // or a kernel that knows nothing of nodes
    finding.found = "all cores reach all memory equally fast";
    return finding;
  }
  finding.found = std::to_string(count) + " nodes, with the cores " + cores +
                  "; this process may use " + std::to_string(usable);
  if (usable > 1) {
    finding.advise(Health::ok,
                   "A rank is fastest if it stays on one node: lockstep run "
                   "--numa-binding=node.");
  }
  return finding;
}

namespace {

constexpr int64_t kMiB = 1 << 20;
// LibTorch alone takes about 0.2 GiB in each rank.
constexpr int64_t kLittleMemory = 1024 * kMiB;
constexpr int64_t kTooLittleMemory = 256 * kMiB;

}  // namespace

Finding check_memory(const MachineRoots& roots) {
  Finding finding{.name = "memory"};
  const auto total = memory_field("MemTotal", roots.proc / "meminfo");
  const auto available = memory_field("MemAvailable", roots.proc / "meminfo");
  if (!total || !available) {
    finding.found = (roots.proc / "meminfo").string() + " cannot be read";
    finding.warn("Mount /proc, if this is a container or a chroot.");
    return finding;
  }
  finding.values = {{"total_bytes", *total},
                    {"available_bytes", *available},
                    {"group_limit_bytes", nullptr},
                    {"group_left_bytes", nullptr}};
  finding.found =
      size_text(*available) + " of " + size_text(*total) + " are free";
  int64_t left = *available;
  if (const auto limit = memory_limit(roots.control_groups())) {
    finding.values["group_limit_bytes"] = limit->limit;
    finding.values["group_left_bytes"] = limit->left();
    finding.found += "; a control group has " + size_text(limit->left()) +
                     " left of " + size_text(limit->limit);
    left = std::min(left, limit->left());
  }
  const std::string remedy =
      " End other processes, or raise the limit of the control group (docker "
      "--memory, Kubernetes limits.memory, systemd MemoryMax=).";
  if (left < kTooLittleMemory) {
    finding.fail(
        "A rank needs more than this before it has a model, and the "
        "kernel kills what needs too much (SIGKILL)." +
        remedy);
  } else if (left < kLittleMemory) {
    finding.warn("Each rank takes some 0.3 GiB before it has a model." +
                 remedy);
  }
  return finding;
}

namespace {

// Docker gives 64 MiB. NCCL needs about 10 MiB for each pair of GPUs that
// cannot reach each other directly, DataLoaders a batch for each worker.
constexpr int64_t kLittleSpace = int64_t{256} << 20;

// Returns why no file can be made in `folder`; 0 if one can.
int error_of_writing(const std::filesystem::path& folder) {
  std::string name = (folder / "lockstep_XXXXXX").string();
  const FileDescriptor fd(::mkostemp(name.data(), O_CLOEXEC));
  const int error = fd ? 0 : errno;
  if (fd) ::unlink(name.c_str());
  return error;
}

}  // namespace

Finding check_dev_shm(const MachineRoots& roots) {
  Finding finding{.name = "/dev/shm"};
  struct statvfs space {};
  if (::statvfs((roots.dev / "shm").c_str(), &space) != 0) {
    finding.found = "is missing";
    finding.warn(
        "NCCL and Python's DataLoader share memory there (Lockstep does not): "
        "mount -t tmpfs -o size=50% tmpfs /dev/shm.");
    return finding;
  }
  const auto block = static_cast<int64_t>(space.f_frsize);
  const auto size = static_cast<int64_t>(space.f_blocks) * block;
  const auto free = static_cast<int64_t>(space.f_bavail) * block;
  finding.values = {{"size_bytes", size}, {"free_bytes", free}};
  finding.found = size_text(free) + " of " + size_text(size) + " are free";
  if (const int error = error_of_writing(roots.dev / "shm"); error != 0) {
    finding.found +=
        std::string(", and it cannot be written: ") + std::strerror(error);
    finding.warn(
        "NCCL and Python's DataLoader make files there and fail (Lockstep does "
        "not): mount it writable for this user, mode 1777.");
    return finding;
  }
  if (free < kLittleSpace) {
    finding.warn(
        "NCCL and Python's DataLoader share memory there and fail when it is "
        "full (Lockstep does not use it): docker --shm-size=8g or --ipc=host, "
        "in Kubernetes a volume of the medium Memory at /dev/shm, elsewhere "
        "mount -o remount,size=50% /dev/shm.");
  }
  return finding;
}

namespace {

// About what two ranks reserve when their group begins.
constexpr size_t kTriedBytes = size_t{4} << 20;

}  // namespace

Finding check_shared_memory() {
  Finding finding{.name = "shared memory"};
  finding.values = {{"tried_bytes", kTriedBytes}};
  try {
    SharedMemory::create(kTriedBytes);
    finding.found =
        size_text(kTriedBytes) + " could be reserved (memfd_create)";
  } catch (const std::system_error& error) {
    finding.found = error.what();
    finding.warn(
        "Ranks of this host talk through Gloo instead, many times slower. "
        "Raise the limit that is named; if none is, let the sandbox allow "
        "memfd_create, or free memory.");
  }
  return finding;
}

Finding check_huge_pages(const MachineRoots& roots) {
  Finding finding{.name = "huge pages"};
  const auto folder = roots.sys / "kernel/mm/transparent_hugepage";
  const auto own = chosen_word(folder / "enabled");
  const auto shared = chosen_word(folder / "shmem_enabled");
  if (!own || !shared) {
    finding.found = "the kernel gives none by itself";
    return finding;
  }
  finding.values = {{"own_memory", *own}, {"shared_memory", *shared}};
  finding.found =
      "\"" + *own + "\" for own memory, \"" + *shared + "\" for shared memory";
  if (*shared == "never" || *shared == "deny") {
    finding.advise(Health::ok,
                   "Before Linux 6.1 shared memory gets some only after, as "
                   "root: echo advise > " +
                       (folder / "shmem_enabled").string());
  }
  return finding;
}

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

// Returns how to raise a limit to `wanted` (nothing means unlimited), with the
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

namespace {

// Larger than this, and an operation of one host seems to end on another before
// it has begun.
constexpr int64_t kLargeError = 100'000;

std::string milliseconds_text(int64_t microseconds) {
  char text[48];
  std::snprintf(text, sizeof text, "%.3g ms",
                static_cast<double>(microseconds) / 1000);
  return text;
}

}  // namespace

std::optional<ClockState> read_clock() {
  timex state{};
  const int result = ::adjtimex(&state);  // modes 0: changes nothing
  if (result < 0) return std::nullopt;
  return ClockState{
      .synchronised = result != TIME_ERROR && (state.status & STA_UNSYNC) == 0,
      .most_error_us = state.maxerror};
}

Finding check_clock(const std::optional<ClockState>& clock) {
  Finding finding{.name = "clock"};
  if (!clock) {
    finding.found = "the system does not tell how exact it is";
    return finding;
  }
  finding.values = {{"synchronised", clock->synchronised},
                    {"most_error_us", clock->most_error_us}};
  const std::string remedy =
      "Times in logs of several hosts cannot be compared. Run chrony or "
      "systemd-timesyncd, on the host if this is a container or a virtual "
      "machine.";
  if (!clock->synchronised) {
    finding.found = "nothing synchronises it";
    finding.warn(remedy);
    return finding;
  }
  finding.found = "synchronised, wrong by " +
                  milliseconds_text(clock->most_error_us) + " at most";
  if (clock->most_error_us > kLargeError) finding.warn(remedy);
  return finding;
}

Finding check_temporary_files() {
  Finding finding{.name = "TMPDIR"};
  const auto wanted = get_env("TMPDIR");
  finding.values = {
      {"TMPDIR", wanted ? nlohmann::ordered_json(*wanted) : nullptr},
      {"folder", nullptr}};
  try {
    const TemporaryPlace place = find_temporary_place();
    finding.values["folder"] = place.folder.string();
    finding.found = "temporary files go to " + place.folder.string();
    if (!place.refused.empty()) {
      finding.found += ", as nothing can be written in " + place.refused;
      finding.warn(
          "lockstep run and Python take the next folder; other programs may "
          "fail. Make the folder, free space in it, or set TMPDIR to another.");
    }
    if (wanted && !wanted->starts_with('/')) {
      finding.warn("TMPDIR is \"" + *wanted +
                   "\", which a program that changes its directory does not "
                   "find again; give an absolute path.");
    }
  } catch (const std::invalid_argument& error) {
    finding.found = error.what();
    finding.fail(
        "lockstep run cannot start without one, except with "
        "--log-dir.");
  }
  return finding;
}

}  // namespace lockstep::internal
