#include "lockstep/cli/doctor/all_reduce.h"

#include <cstdio>

namespace lockstep::internal {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kSmallBytes = 4;
constexpr int64_t kLargeBytes = int64_t{16} << 20;
// On idle cores 4 bytes take some microseconds. If the ranks are not on cores
// at the same time, they take a turn of the scheduler, milliseconds.
constexpr double kSlowMicroseconds = 500;

std::string short_text(double value, const char* unit) {
  char text[48];
  std::snprintf(text, sizeof text, value < 100 ? "%.3g %s" : "%.0f %s", value,
                unit);
  return text;
}

// Returns the entry for this size; null if there is none.
ordered_json entry_of(const ordered_json& document, int64_t bytes) {
  if (!document.is_object()) return nullptr;
  for (const auto& entry : document.value("results", ordered_json::array())) {
    if (entry.value("bytes", int64_t{-1}) == bytes) return entry;
  }
  return nullptr;
}

}  // namespace

std::vector<std::string> all_reduce_arguments() {
  return {"all_reduce",
          "--sizes=" + std::to_string(kSmallBytes) + "," +
              std::to_string(kLargeBytes),
          "--ranks=2",
          "--seconds=0.5",
          "--timeout=20",
          "--json=-"};
}

Finding check_all_reduce(const std::optional<CapturedProgram>& answer) {
  Finding finding{.name = "all_reduce"};
  if (!answer) {
    finding.found = std::string("libexec/lockstep/") + kAllReduceProgram +
                    " is missing, so nothing was tried";
    finding.warn("Build it (./dev build), or install Lockstep again.");
    return finding;
  }
  const auto document = ordered_json::parse(answer->out, nullptr, false);
  const auto small = entry_of(document, kSmallBytes);
  const auto large = entry_of(document, kLargeBytes);
  if (!answer->succeeded() || small.is_null() || large.is_null()) {
    finding.found = "two ranks of this host failed";
    if (!answer->in_time) {
      finding.found = "two ranks of this host did not end in time";
    } else if (!answer->last_line().empty()) {
      finding.found += ": " + answer->last_line();
    }
    finding.fail(
        "Fix what fails or warns above first, then try lockstep bench "
        "all_reduce, which prints more.");
    return finding;
  }
  const double latency = small.at("latency_us").at("p50");
  const double bandwidth = large.at("busbw_gbps");
  finding.values = {
      {"ranks", 2}, {"latency_us", latency}, {"bus_bandwidth_gbps", bandwidth}};
  finding.found = "2 ranks: " + short_text(latency, "us") + " for 4 B, " +
                  short_text(bandwidth, "GB/s") + " for 16 MiB";
  if (latency > kSlowMicroseconds) {
    finding.warn(
        "That is slow: idle cores need some microseconds for 4 B. Other "
        "processes may keep the cores busy (top), or a control group may take "
        "them away (\"cores\" above).");
  }
  return finding;
}

}  // namespace lockstep::internal
