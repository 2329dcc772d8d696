#include "lockstep/cli/machine.h"

#include <sys/utsname.h>

#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>

#include "lockstep/launch/process/cpu_topology.h"

namespace lockstep::internal {

using nlohmann::ordered_json;

namespace {

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  utsname names{};
  uname(&names);
  return names.machine;
}

}  // namespace

int cores() { return static_cast<int>(allowed_cpus().size()); }

ordered_json machine_facts() {
  utsname names{};
  uname(&names);
  double load[1] = {0};
  getloadavg(load, 1);
  return {{"cores", cores()},
          {"cpu", processor()},
          {"system", std::string(names.sysname) + " " + names.release},
          {"load_before", std::round(load[0] * 100) / 100}};
}

std::string utc_date() {
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S+00:00", &utc);
  return date;
}

}  // namespace lockstep::internal
