#include "lockstep/observe/system_metrics.h"

#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <unistd.h>

#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "lockstep/worker/gpu_usage.h"

namespace lockstep {
namespace {

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) +
         1e-6 * static_cast<double>(time.tv_usec);
}

void read_network(SystemMetrics& metrics) {
  std::ifstream file("/proc/net/dev");
  constexpr auto kLine = std::numeric_limits<std::streamsize>::max();
  file.ignore(kLine, '\n').ignore(kLine, '\n');  // titles
  // "  eth0: <bytes received> <7 other numbers> <bytes sent> ..."
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(' ');
    if (line.substr(begin, colon - begin) == "lo") continue;
    std::istringstream numbers(line.substr(colon + 1));
    int64_t received = 0, other = 0, sent = 0;
    numbers >> received;
    for (int skipped = 0; skipped < 7; ++skipped) numbers >> other;
    numbers >> sent;
    metrics.received_bytes += received;
    metrics.sent_bytes += sent;
  }
}

}  // namespace

SystemMetrics system_metrics() {
  SystemMetrics metrics{.time = std::chrono::steady_clock::now()};
  rusage usage{};
  if (::getrusage(RUSAGE_SELF, &usage) == 0) {
    metrics.cpu_seconds =
        seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
  }
  // The second number: pages in RAM.
  std::ifstream memory("/proc/self/statm");
  int64_t size = 0, resident = 0;
  if (memory >> size >> resident) {
    metrics.resident_bytes = resident * ::sysconf(_SC_PAGESIZE);
  }
  struct statvfs shared {};
  if (::statvfs("/dev/shm", &shared) == 0) {
    const auto block = static_cast<int64_t>(shared.f_frsize);
    metrics.shared_memory_size = static_cast<int64_t>(shared.f_blocks) * block;
    metrics.shared_memory_bytes =
        static_cast<int64_t>(shared.f_blocks - shared.f_bfree) * block;
  }
  read_network(metrics);
  if (const auto gpus = internal::gpu_usage()) {
    metrics.gpu_memory_bytes = gpus->memory_bytes;
    metrics.gpu_percent = gpus->busy_percent;
    metrics.gpu_watts = gpus->watts;
    if (gpus->celsius) metrics.gpu_celsius = *gpus->celsius;
  }
  return metrics;
}

double cpu_percent(const SystemMetrics& earlier, const SystemMetrics& later) {
  const double seconds =
      std::chrono::duration<double>(later.time - earlier.time).count();
  if (seconds <= 0) return 0;
  return 100 * (later.cpu_seconds - earlier.cpu_seconds) / seconds;
}

}  // namespace lockstep
