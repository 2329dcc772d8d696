#include "lockstep/cli/doctor/program_checks.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdio>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/agent/worker_environment.h"
#include "lockstep/launch/process/child_process.h"

namespace lockstep::internal {
namespace {

constexpr size_t kMostText = size_t{1} << 20;
constexpr std::chrono::milliseconds kReapInterval{2};
// A process that got SIGKILL ends within this time, unless the kernel itself
// holds it.
constexpr std::chrono::milliseconds kKillAllowance{5'000};

struct Stream {
  FileDescriptor read_end;
  std::string& text;
};

std::pair<FileDescriptor, FileDescriptor> pipe_ends() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe2");
  return {FileDescriptor(ends[0]),
          above_standard_streams(FileDescriptor(ends[1]))};
}

void read_some(Stream& stream) {
  std::array<char, 65536> bytes;
  const ssize_t count = read(stream.read_end.get(), bytes.data(), bytes.size());
  if (count < 0 && errno == EINTR) return;
  if (count <= 0) {
    stream.read_end.reset();
    return;
  }
  const size_t room = kMostText - stream.text.size();
  stream.text.append(bytes.data(), std::min(static_cast<size_t>(count), room));
}

void await_end(ChildProcess& child, const Deadline& deadline) {
  while (!child.reap() && !deadline.expired()) {
    poll(nullptr, 0, static_cast<int>(kReapInterval.count()));
  }
}

}  // namespace

std::string CapturedProgram::last_line() const {
  const size_t last = err.find_last_not_of("\n ");
  if (last == std::string::npos) return {};
  const size_t before = err.rfind('\n', last);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  return err.substr(begin, last + 1 - begin);
}

CapturedProgram run_captured(const std::filesystem::path& path,
                             const std::vector<std::string>& arguments,
                             std::chrono::milliseconds allowed) {
  const Deadline deadline = Deadline::after(allowed);
  CapturedProgram result;
  auto [out, out_end] = pipe_ends();
  auto [err, err_end] = pipe_ends();
  const FileDescriptor nothing = above_standard_streams(
      FileDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC)));
  std::vector<std::string> all{path.filename()};
  all.insert(all.end(), arguments.begin(), arguments.end());
  const auto environment = current_environment();
  Surroundings surroundings;
  sigprocmask(SIG_SETMASK, nullptr, &surroundings.signal_mask);
  auto child = ChildProcess::start({.what = "starting " + path.string(),
                                    .path = path,
                                    .arguments = all,
                                    .environment = environment,
                                    .stdin_fd = nothing.get(),
                                    .stdout_fd = out_end.get(),
                                    .stderr_fd = err_end.get(),
                                    .surroundings = surroundings});
  out_end.reset();
  err_end.reset();
  std::array<Stream, 2> streams{Stream{std::move(out), result.out},
                                Stream{std::move(err), result.err}};
  while ((streams[0].read_end || streams[1].read_end) && !deadline.expired()) {
    std::array<pollfd, 2> entries{pollfd{streams[0].read_end.get(), POLLIN, 0},
                                  pollfd{streams[1].read_end.get(), POLLIN, 0}};
    const auto left = std::min<int64_t>(deadline.remaining().count(), INT_MAX);
    if (poll(entries.data(), entries.size(), static_cast<int>(left)) <= 0) {
      continue;
    }
    for (size_t i = 0; i < streams.size(); ++i) {
      if (entries[i].revents != 0) read_some(streams[i]);
    }
  }
  await_end(child, deadline);
  if (!child.ended()) {
    result.in_time = false;
    child.signal_group(SIGKILL);
    await_end(child, Deadline::after(kKillAllowance));
  }
  if (child.ended() && child.wait_status()) {
    result.exit_code = child.exit_code();
  }
  return result;
}

namespace {

using nlohmann::ordered_json;

Finding describe_torch(const ordered_json& torch, int gpus) {
  Finding finding{.name = "LibTorch"};
  finding.values = torch;
  finding.values.erase("backends");
  const int seen = torch.at("gpus");
  const bool for_cuda = torch.at("cuda");
  finding.found = torch.at("version").get<std::string>() + ", " +
                  torch.at("cpu_capability").get<std::string>() + ", " +
                  std::to_string(torch.at("threads").get<int>()) + " threads";
  finding.found +=
      for_cuda ? ", " + std::to_string(seen) + " GPUs" : ", for CPUs only";
  if (gpus > 0 && !for_cuda) {
    finding.warn(
        "Ranks will not use the GPUs. Build Lockstep against a LibTorch for "
        "CUDA (cmake --preset cuda).");
  } else if (seen < gpus) {
    finding.fail("LibTorch sees " + std::to_string(seen) + " of " +
                 std::to_string(gpus) +
                 " GPUs. Its CUDA may need a newer driver: compare with the "
                 "version at the top of what nvidia-smi prints.");
  }
  return finding;
}

Finding describe_backends(const ordered_json& backends, int gpus) {
  Finding finding{.name = "backends"};
  finding.values = backends;
  std::string missing;
  for (const auto& [name, reason] : backends.items()) {
    if (reason.is_null()) {
      finding.found += (finding.found.empty() ? "" : ", ") + name;
      continue;
    }
    missing += (missing.empty() ? "; without " : ", ") + name;
    if (name == "nccl" && gpus > 0) {
      finding.warn("nccl: " + reason.get<std::string>() + ".");
    }
  }
  if (!missing.empty()) missing += " (--json says why)";
  finding.found += missing;
  return finding;
}

}  // namespace

std::vector<Finding> check_libtorch(
    const std::optional<CapturedProgram>& answer, int gpus) {
  Finding trouble{.name = "LibTorch"};
  if (!answer) {
    trouble.found = std::string("libexec/lockstep/") + kTorchProgram +
                    " is missing, so LibTorch and the backends are not known";
    trouble.warn("Build it (./dev build), or install Lockstep again.");
    return {trouble};
  }
  if (!answer->in_time) {
    trouble.found = "a program that links it did not start in time";
    trouble.fail(
        "Its libraries may lie on a slow or hanging file system, or the GPUs' "
        "driver hangs (does nvidia-smi answer?).");
    return {trouble};
  }
  const auto torch = ordered_json::parse(answer->out, nullptr, false);
  if (answer->exit_code != 0 || !torch.is_object()) {
    trouble.found = "a program that links it ended with exit code " +
                    std::to_string(answer->exit_code);
    if (!answer->last_line().empty()) {
      trouble.found += ": " + answer->last_line();
    }
    trouble.fail(
        "No rank can start. Install the LibTorch that Lockstep was built with "
        "at its place, or build Lockstep again.");
    return {trouble};
  }
  return {describe_torch(torch, gpus),
          describe_backends(torch.at("backends"), gpus)};
}

namespace {

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
