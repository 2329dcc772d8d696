#include "lockstep/cli/machine.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>

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

int cores() {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  // This fails on a host of more than CPU_SETSIZE processors.
  if (sched_getaffinity(0, sizeof(mine), &mine) == 0) return CPU_COUNT(&mine);
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

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

}  // namespace lockstep::internal
