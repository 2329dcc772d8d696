#include "lockstep/cli/doctor/nvml.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "lockstep/base/deadline.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/launch/process/child_process.h"
#include "lockstep/worker/nvml.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;

// A process that got SIGKILL ends within this time, unless the driver holds it.
constexpr std::chrono::milliseconds kKillTime{500};

// Returns what ask_nvml() returns, as JSON; null for nothing.
json ask_here(const std::string& name) {
  json answer{{"error", ""},
              {"driver", ""},
              {"gpus", json::array()},
              {"apart", json::array()}};
  try {
    const auto nvml = Nvml::load(name);
    if (!nvml) return nullptr;
    answer["driver"] = nvml->driver();
    const auto devices = nvml->devices();
    for (size_t i = 0; i < devices.size(); ++i) {
      answer["gpus"].push_back({nvml->name_of(devices[i]),
                                nvml->memory_bytes(devices[i]).value_or(0)});
      for (size_t other = 0; other < i; ++other) {
        if (nvml->reads(devices[i], devices[other]) &&
            nvml->reads(devices[other], devices[i])) {
          continue;
        }
        answer["apart"].push_back({other, i});
      }
    }
  } catch (const std::runtime_error& error) {
    answer["error"] = error.what();
  }
  return answer;
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(fd, text.data(), text.size());
    if (count <= 0) return;
    text.remove_prefix(static_cast<size_t>(count));
  }
}

// Returns what comes from `fd` until its end or the deadline.
std::string read_all(int fd, const Deadline& deadline) {
  std::string text;
  while (!deadline.expired()) {
    pollfd entry{fd, POLLIN, 0};
    if (poll(&entry, 1, static_cast<int>(deadline.remaining().count())) <= 0) {
      continue;
    }
    std::array<char, 4096> bytes;
    const ssize_t count = read(fd, bytes.data(), bytes.size());
    if (count <= 0) break;
    text.append(bytes.data(), static_cast<size_t>(count));
  }
  return text;
}

void end(ChildProcess& child) {
  child.signal(SIGKILL);
  // If the driver holds it in the kernel, it stays.
  const Deadline deadline = Deadline::after(kKillTime);
  while (!child.reap() && !deadline.expired()) poll(nullptr, 0, 1);
}

// Does what ask_nvml() does. Throws std::system_error if no process can be
// started.
std::optional<NvmlAnswer> ask_in_a_process(const std::string& library,
                                           std::chrono::milliseconds allowed) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe2");
  const FileDescriptor answers(ends[0]);
  FileDescriptor answering(ends[1]);
  const pid_t parent = getpid();
  auto child = ChildProcess::fork("starting a process for NVML", [&] {
    // If this process is killed while the library hangs, the kernel must end
    // the child.
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) return 1;
    write_all(answering.get(), ask_here(library).dump());
    return 0;
  });
  answering.reset();
  const Deadline deadline = Deadline::after(allowed);
  const std::string text = read_all(answers.get(), deadline);
  end(child);
  const json found = json::parse(text, nullptr, false);
  if (found.is_null()) return std::nullopt;
  if (!found.is_object()) {
    if (!deadline.expired()) return NvmlAnswer{.error = "its library crashed"};
    return NvmlAnswer{.error = "no answer within " +
                               std::to_string(allowed.count()) + " ms"};
  }
  NvmlAnswer answer{.error = found.at("error"), .driver = found.at("driver")};
  for (const auto& gpu : found.at("gpus")) {
    answer.gpus.push_back({gpu.at(0), gpu.at(1)});
  }
  answer.apart = found.at("apart").get<std::vector<std::pair<int, int>>>();
  return answer;
}

}  // namespace

std::optional<NvmlAnswer> ask_nvml(const std::string& library,
                                   std::chrono::milliseconds allowed) {
  try {
    return ask_in_a_process(library, allowed);
  } catch (const std::system_error& error) {
    return NvmlAnswer{.error = error.what()};
  }
}

}  // namespace lockstep::internal
