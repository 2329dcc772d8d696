#include "lockstep/cli/doctor/cores.h"

#include <cstdio>
#include <cstdlib>

#include "lockstep/launch/process/system_file.h"
#include "lockstep/launch/process/usable_cores.h"

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
  const auto place = roots.control_groups();
  const auto granted = granted_cores(place.root, place.membership);
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

}  // namespace lockstep::internal
