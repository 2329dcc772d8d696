#include "lockstep/observe/system_metrics.h"

#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <fstream>
#include <limits>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "lockstep/base/environment.h"
#include "lockstep/base/signals.h"
#include "lockstep/observe/log_names.h"
#include "lockstep/worker/nvml.h"

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

class SystemMetricsSampler::Impl {
 public:
  Impl(SummaryWriter& writer, SystemMetricsSamplerOptions options)
      : writer_(writer),
        options_(std::move(options)),
        first_(system_metrics()),
        thread_(internal::quiet_thread([this] { run(); })) {}

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    end_.notify_one();
    thread_.join();
  }

  bool is_foreign() const { return made_in_.is_foreign(); }

 private:
  void run() {
    SystemMetrics before = first_;
    std::unique_lock lock(mutex_);
    while (!end_.wait_for(lock, options_.interval, [&] { return ended_; })) {
      const SystemMetrics now = system_metrics();
      try {
        write(before, now);
      } catch (const std::exception&) {
        return;  // the writer was closed
      }
      before = now;
    }
  }

  void write(const SystemMetrics& before, const SystemMetrics& now) {
    const auto step =
        std::chrono::round<std::chrono::seconds>(now.time - first_.time)
            .count();
    const auto add = [&](const char* name, double value) {
      writer_.add_scalar(options_.prefix + "/" + name, value, step);
    };
    add("cpu_percent", cpu_percent(before, now));
    add("resident_bytes", static_cast<double>(now.resident_bytes));
    add("shared_memory_bytes", static_cast<double>(now.shared_memory_bytes));
    add("received_bytes", static_cast<double>(now.received_bytes));
    add("sent_bytes", static_cast<double>(now.sent_bytes));
    const auto add_known = [&](const char* name, const auto& value) {
      if (value) add(name, static_cast<double>(*value));
    };
    add_known("gpu_percent", now.gpu_percent);
    add_known("gpu_memory_bytes", now.gpu_memory_bytes);
    add_known("gpu_watts", now.gpu_watts);
    add_known("gpu_celsius", now.gpu_celsius);
  }

  SummaryWriter& writer_;
  const SystemMetricsSamplerOptions options_;
  const SystemMetrics first_;
  const internal::ProcessMark made_in_;
  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;
  std::thread thread_;  // last: it uses the others
};

SystemMetricsSampler::SystemMetricsSampler(
    SummaryWriter& writer, SystemMetricsSamplerOptions options) {
  internal::require_name("SystemMetricsSamplerOptions::prefix", options.prefix);
  constexpr std::chrono::milliseconds kYear = std::chrono::hours(24 * 365);
  if (options.interval < std::chrono::milliseconds(1) ||
      options.interval > kYear) {
    throw std::invalid_argument("SystemMetricsSamplerOptions::interval is " +
                                std::to_string(options.interval.count()) +
                                " ms; give 1 ms or more, and a year at most");
  }
  if (writer.writes()) {
    impl_ = std::make_unique<Impl>(writer, std::move(options));
  }
}

SystemMetricsSampler::~SystemMetricsSampler() {
  // The thread is not in a forked child, and may have held the mutex.
  if (impl_ && impl_->is_foreign()) {
    [[maybe_unused]] const Impl* const left = impl_.release();
  }
}

}  // namespace lockstep
