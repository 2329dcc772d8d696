#include "lockstep/launch/process/local_devices.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "lockstep/base/environment.h"
#include "lockstep/launch/process/cpu_topology.h"
#include "lockstep/launch/process/system_file.h"

namespace lockstep {
namespace {

constexpr int kMostProcesses = 4096;

bool is_number(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return c >= '0' && c <= '9';
  });
}

namespace fs = std::filesystem;

// "50000 100000" is half a core, "max 100000" no limit.
std::optional<double> quota_of_version_2(const fs::path& group) {
  std::ifstream file(group / "cpu.max");
  double quota = 0;
  double period = 0;
  if (!(file >> quota >> period) || period <= 0) return std::nullopt;
  return quota / period;
}

std::optional<double> quota_of_version_1(const fs::path& group) {
  std::ifstream quota_file(group / "cpu.cfs_quota_us");
  std::ifstream period_file(group / "cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 ||
      period <= 0) {
    return std::nullopt;
  }
  return quota / period;
}

bool is_whole_number(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return c >= '0' && c <= '9';
  });
}

}  // namespace

int resolve_process_count(std::string_view text) {
  if (text == "cpu") return usable_cores();
  if (text == "auto") {
    const int gpus = visible_gpus();
    return gpus > 0 ? gpus : usable_cores();
  }
  if (text == "gpu") {
    const int gpus = visible_gpus();
    if (gpus > 0) return gpus;
    throw std::invalid_argument(
        std::getenv("CUDA_VISIBLE_DEVICES") != nullptr
            ? "--nproc-per-node is \"gpu\", and CUDA_VISIBLE_DEVICES leaves no "
              "GPU of this host visible; unset it, or give a number, \"cpu\" "
              "or \"auto\""
            : "--nproc-per-node is \"gpu\", and this host has no NVIDIA GPU "
              "(/dev/nvidia0); give a number, \"cpu\" or \"auto\"");
  }
  if (!is_number(text)) {
    throw std::invalid_argument("--nproc-per-node is \"" + std::string(text) +
                                "\"; allowed is a whole number from 1 to " +
                                std::to_string(kMostProcesses) +
                                ", \"auto\", \"cpu\" or \"gpu\"");
  }
  return static_cast<int>(
      internal::parse_int("--nproc-per-node", text, 1, kMostProcesses));
}

int usable_cores() {
  int cores = static_cast<int>(internal::allowed_cpus().size());
  if (const auto granted = granted_cores()) {
    cores = std::min(cores, static_cast<int>(*granted));
  }
  return std::max(cores, 1);
}

std::optional<double> granted_cores(const std::string& root,
                                    const std::string& membership) {
  std::optional<double> least;
  for (const auto& group :
       internal::control_groups("cpu", {root, membership})) {
    const auto granted = group.version_1 ? quota_of_version_1(group.folder)
                                         : quota_of_version_2(group.folder);
    if (granted && (!least || *granted < *least)) least = granted;
  }
  return least;
}

int visible_gpus(const std::string& device_directory) {
  int devices = 0;
  for (const auto& name : internal::names_in(device_directory)) {
    devices += name.starts_with("nvidia") && is_whole_number(name.substr(6));
  }
  return static_cast<int>(internal::visible_gpu_names(devices).size());
}

namespace internal {

std::vector<std::string> visible_gpu_names(int devices) {
  std::vector<std::string> names;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) {
    for (int at = 0; at < devices; ++at) names.push_back(std::to_string(at));
    return names;
  }
  for (auto& name : named_gpus(visible)) {
    if (std::ssize(names) == devices ||
        (is_whole_number(name) && std::stoi(name) >= devices)) {
      break;
    }
    names.push_back(std::move(name));
  }
  return names;
}

std::vector<std::string> named_gpus(std::string_view visible) {
  std::vector<std::string> names;
  std::string_view rest = visible;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    std::string_view item = rest.substr(0, comma);
    while (item.starts_with(' ')) item.remove_prefix(1);
    while (item.ends_with(' ')) item.remove_suffix(1);
    const bool names_device = item.starts_with("GPU-") ||
                              item.starts_with("MIG-") ||
                              (is_whole_number(item) && item.size() < 6);
    if (!names_device) break;
    names.emplace_back(item);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return names;
}

}  // namespace internal

}  // namespace lockstep
