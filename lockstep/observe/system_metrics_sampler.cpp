#include "lockstep/observe/system_metrics_sampler.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "lockstep/base/process_mark.h"
#include "lockstep/observe/log_names.h"
#include "lockstep/observe/system_metrics.h"

namespace lockstep {

class SystemMetricsSampler::Impl {
 public:
  Impl(SummaryWriter& writer, SystemMetricsSamplerOptions options)
      : writer_(writer),
        options_(std::move(options)),
        first_(system_metrics()),
        thread_([this] { run(); }) {}

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
