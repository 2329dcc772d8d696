#include "lockstep/comm/backend_registry.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include <ATen/Context.h>

namespace lockstep::internal {
namespace {

std::string why_missing(const BackendEntry& entry) {
  return entry.missing ? entry.missing() : std::string();
}

// Whether `entry` is left out of the list of backends in an error text. A
// backend that cannot answer because the environment is wrong is left out, too.
bool is_missing(const BackendEntry& entry) {
  try {
    return !why_missing(entry).empty();
  } catch (const std::invalid_argument&) {
    return true;
  }
}

std::string known_names() {
  std::string names;
  for (const auto& entry : registered_backends()) {
    if (is_missing(entry)) continue;
    names += (names.empty() ? "\"" : ", \"") + entry.name + "\"";
  }
  return names;
}

const BackendEntry& find_backend(const std::string& name,
                                 const std::string& config) {
  const auto in_config =
      name == config ? std::string() : " in \"" + config + "\"";
  for (const auto& entry : registered_backends()) {
    if (entry.name != name) continue;
    if (auto why = why_missing(entry); !why.empty()) {
      throw std::invalid_argument("backend \"" + name + "\"" + in_config +
                                  " cannot be used: " + why);
    }
    return entry;
  }
  throw std::invalid_argument(
      "unknown backend \"" + name + "\"" + in_config +
      "; this build of Lockstep has " + known_names() +
      ". Give one of them, a device map such as \"cpu:gloo\", or nothing to "
      "choose by device");
}

std::map<c10::DeviceType, const BackendEntry*> choose_by_device() {
  std::map<c10::DeviceType, const BackendEntry*> chosen;
  for (auto type : {c10::kCPU, c10::kCUDA}) {
    if (type == c10::kCUDA && !at::globalContext().hasCUDA()) continue;
    for (const auto& entry : registered_backends()) {
      if (!chosen.contains(type) && !entry.imagines_peers &&
          std::ranges::count(entry.default_devices, type) &&
          why_missing(entry).empty()) {
        chosen.emplace(type, &entry);
      }
    }
  }
  return chosen;
}

}  // namespace

std::map<c10::DeviceType, const BackendEntry*> resolve_backends(
    const std::string& config) {
  if (config.empty()) return choose_by_device();
  std::map<c10::DeviceType, const BackendEntry*> chosen;
  if (config.find(':') == std::string::npos) {
    const auto& entry = find_backend(config, config);
    for (auto type : entry.default_devices) chosen.emplace(type, &entry);
    return chosen;
  }
  std::istringstream pairs(config);
  for (std::string pair; std::getline(pairs, pair, ',');) {
    auto colon = pair.find(':');
    if (colon == std::string::npos || pair.find(':', colon + 1) != pair.npos) {
      throw std::invalid_argument(
          "backend \"" + config + "\": \"" + pair +
          "\" is not of the form device:backend; give for example "
          "\"cpu:gloo\" or \"cpu:gloo,cuda:nccl\"");
    }
    std::string device = pair.substr(0, colon);
    if (device != "cpu" && device != "cuda") {
      throw std::invalid_argument("backend \"" + config +
                                  "\": unknown device type \"" + device +
                                  "\"; allowed are cpu and cuda");
    }
    auto type = device == "cpu" ? c10::kCPU : c10::kCUDA;
    const auto& entry = find_backend(pair.substr(colon + 1), config);
    if (!std::ranges::count(entry.devices, type)) {
      throw std::invalid_argument("backend \"" + entry.name +
                                  "\" does not serve device type " + device +
                                  " (given: \"" + config + "\")");
    }
    if (!chosen.emplace(type, &entry).second) {
      throw std::invalid_argument("backend \"" + config +
                                  "\" names device type " + device + " twice");
    }
  }
  return chosen;
}

bool python_may_join(const std::string& config) {
  return std::ranges::all_of(resolve_backends(config), [](const auto& each) {
    return each.second->python_may_join;
  });
}

bool imagines_peers(const std::string& config) {
  return std::ranges::all_of(resolve_backends(config), [](const auto& each) {
    return each.second->imagines_peers;
  });
}

}  // namespace lockstep::internal
