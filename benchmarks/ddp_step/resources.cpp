#include "benchmarks/ddp_step/resources.h"

#include <sys/resource.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>

namespace benchmarks {
namespace {

// Reads the lines "Name: 123 kB" of a file.
std::map<std::string, int64_t> sizes(const char* path) {
  std::map<std::string, int64_t> result;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name, unit;
    int64_t value = 0;
    if (words >> name >> value >> unit && unit == "kB") {
      result[name.substr(0, name.size() - 1)] = value;
    }
  }
  return result;
}

int64_t microseconds(const timeval& time) {
  return int64_t{time.tv_sec} * 1'000'000 + time.tv_usec;
}

}  // namespace

Memory memory() {
  auto status = sizes("/proc/self/status");
  auto mapped = sizes("/proc/self/smaps_rollup");
  return {.peak_rss = status["VmHWM"],
          .rss = mapped["Rss"],
          .pss = mapped["Pss"],
          .private_rss = mapped["Private_Clean"] + mapped["Private_Dirty"]};
}

Usage usage() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return {.switches = int64_t{used.ru_nvcsw} + used.ru_nivcsw,
          .cpu_us = microseconds(used.ru_utime) + microseconds(used.ru_stime)};
}

}  // namespace benchmarks
