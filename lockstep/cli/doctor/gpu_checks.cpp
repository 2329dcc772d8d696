#include "lockstep/cli/doctor/gpu_checks.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/system_file.h"
#include "lockstep/cli/text.h"
#include "lockstep/launch/process/child_process.h"
#include "lockstep/launch/process/visible_gpus.h"

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

namespace {

// Returns how many devices on the PCI bus are displays or 3D controllers of
// NVIDIA, with a driver or without one.
int on_the_bus(const MachineRoots& roots) {
  const auto folder = roots.sys / "bus/pci/devices";
  int count = 0;
  for (const auto& name : names_in(folder)) {
    const auto vendor = first_line(folder / name / "vendor");
    const auto kind = first_line(folder / name / "class");
    count += vendor == "0x10de" && kind && kind->starts_with("0x03");
  }
  return count;
}

// Returns the paths of nvidia0, nvidia1, ...
std::vector<std::string> device_files(const MachineRoots& roots) {
  std::vector<std::string> files;
  for (const auto& name : names_in(roots.dev)) {
    const std::string number = name.starts_with("nvidia") ? name.substr(6) : "";
    if (!number.empty() &&
        number.find_first_not_of("0123456789") == std::string::npos) {
      files.push_back(roots.dev / name);
    }
  }
  return files;
}

// Returns "2 x NVIDIA H200 (140 GiB)".
std::string list(const std::vector<NvmlAnswer::Gpu>& gpus) {
  std::map<std::string, int> kinds;
  for (const auto& gpu : gpus) {
    ++kinds[gpu.memory_bytes == 0
                ? gpu.name
                : gpu.name + " (" + size_text(gpu.memory_bytes) + ")"];
  }
  std::string text;
  for (const auto& [kind, count] : kinds) {
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " x " + kind;
  }
  return text;
}

Finding check_devices(const MachineRoots& roots,
                      const std::optional<NvmlAnswer>& nvml) {
  Finding finding{.name = "GPUs"};
  const auto files = device_files(roots);
  const int visible = lockstep::visible_gpus(roots.dev);
  finding.values = {{"devices", files.size()}, {"visible", visible}};
  if (files.empty()) {
    const int present = on_the_bus(roots);
    finding.values["on_the_bus"] = present;
    finding.found = "none";
    if (present > 0) {
      finding.found = std::to_string(present) +
                      " of NVIDIA on the bus, but no " +
                      (roots.dev / "nvidia0").string();
      finding.warn(
          "Ranks will train on CPUs. Install and load NVIDIA's driver "
          "(nvidia-smi shows the GPUs then); start a container with docker "
          "--gpus all.");
    }
    return finding;
  }
  finding.found = std::to_string(files.size()) + " of NVIDIA";
  if (nvml && nvml->error.empty() && !nvml->gpus.empty()) {
    finding.found = list(nvml->gpus) + ", driver " + nvml->driver;
    finding.values["driver"] = nvml->driver;
    for (const auto& gpu : nvml->gpus) {
      finding.values["names"].push_back(gpu.name);
    }
  }
  const auto may_open = std::ranges::count_if(files, [](const auto& file) {
    return access(file.c_str(), R_OK | W_OK) == 0;
  });
  finding.values["may_open"] = may_open;
  // A scheduler may give a job some of the host's GPUs.
  if (may_open > 0 && may_open < std::ssize(files)) {
    finding.found += "; this process may open " + std::to_string(may_open) +
                     " of " + std::to_string(files.size());
  }
  if (may_open == 0) {
    finding.fail("This user may not open " + files.front() +
                 " and the like. Add the user to the group that owns them.");
  }
  if (nvml && !nvml->error.empty()) {
    finding.found += ", whose driver says: " + nvml->error;
    finding.fail(
        "No rank can use them. Load the driver again or boot, so that its "
        "kernel module and its libraries are of one version; nvidia-smi then "
        "shows the GPUs.");
  }
  if (!nvml) {
    finding.warn(
        "The driver's library libnvidia-ml.so.1 cannot be loaded. Install the "
        "driver's libraries; start a container with docker --gpus all.");
  }
  if (visible < static_cast<int>(files.size())) {
    finding.found += "; CUDA_VISIBLE_DEVICES=" +
                     get_env("CUDA_VISIBLE_DEVICES").value_or("") + " leaves " +
                     std::to_string(visible);
    if (visible == 0) {
      finding.warn("Ranks will train on CPUs. Unset CUDA_VISIBLE_DEVICES.");
    }
  }
  return finding;
}

Finding check_peer_access(const NvmlAnswer& nvml) {
  Finding finding{.name = "GPU peers"};
  const size_t gpus = nvml.gpus.size();
  const size_t pairs = gpus * (gpus - 1) / 2;
  finding.values = {{"pairs", pairs},
                    {"apart", nlohmann::ordered_json::array()}};
  std::string apart;
  for (const auto& [one, other] : nvml.apart) {
    apart += " " + std::to_string(one) + "-" + std::to_string(other);
    finding.values["apart"].push_back({one, other});
  }
  if (apart.empty()) {
    finding.found = "each reads the memory of each other directly";
    return finding;
  }
  finding.found = std::to_string(nvml.apart.size()) + " of " +
                  std::to_string(pairs) +
                  " pairs cannot read each other's memory:" + apart;
  finding.warn(
      "NCCL sends through the host's memory between them, which is slower: "
      "nvidia-smi topo -m shows their links. Switch PCI access control (ACS) "
      "and IOMMU off, or pass NVLink through, if this is a virtual machine.");
  return finding;
}

}  // namespace

std::vector<Finding> check_gpus(const MachineRoots& roots,
                                const std::optional<NvmlAnswer>& nvml) {
  std::vector<Finding> findings{check_devices(roots, nvml)};
  if (nvml && nvml->gpus.size() > 1) {
    findings.push_back(check_peer_access(*nvml));
  }
  return findings;
}

}  // namespace lockstep::internal
