#include "lockstep/launch/process/process_usage.h"

#include <unistd.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace lockstep::internal {

std::optional<ProcessUsage> usage_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string line{std::istreambuf_iterator<char>(file), {}};
  // The program's name is in parentheses and may hold anything.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  ProcessUsage usage;
  fields >> usage.state;
  // The next field is the 4th of proc(5); utime is the 14th.
  std::string skipped;
  for (int field = 4; field < 14; ++field) fields >> skipped;
  int64_t user = 0;
  int64_t system = 0;
  fields >> user >> system;
  for (int field = 16; field < 24; ++field) fields >> skipped;
  int64_t pages = 0;
  fields >> pages;
  if (!fields) return std::nullopt;
  usage.cpu_ns = (user + system) * (1'000'000'000 / sysconf(_SC_CLK_TCK));
  usage.resident_bytes = pages * sysconf(_SC_PAGESIZE);
  return usage;
}

}  // namespace lockstep::internal
