#include "lockstep/cli/doctor/memory.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "lockstep/cli/size_text.h"
#include "lockstep/launch/process/system_file.h"

namespace lockstep::internal {
namespace {

constexpr int64_t kMiB = 1 << 20;
// LibTorch alone takes about 0.2 GiB in each rank.
constexpr int64_t kLittleMemory = 1024 * kMiB;
constexpr int64_t kTooLittleMemory = 256 * kMiB;

// Returns the bytes of a line "MemTotal:  24684084 kB".
std::optional<int64_t> bytes_of(const MachineRoots& roots,
                                const std::string& key) {
  const auto text = field_of(roots.proc / "meminfo", key);
  int64_t kilobytes = 0;
  if (!text ||
      std::from_chars(text->data(), text->data() + text->size(), kilobytes)
              .ec != std::errc()) {
    return std::nullopt;
  }
  return kilobytes * 1024;
}

}  // namespace

Finding check_memory(const MachineRoots& roots) {
  Finding finding{.name = "memory"};
  const auto total = bytes_of(roots, "MemTotal");
  const auto available = bytes_of(roots, "MemAvailable");
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

}  // namespace lockstep::internal
