#include "lockstep/comm/backend_registry.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "lockstep/comm/accelerator.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/register_backend.h"

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
  std::vector<c10::DeviceType> types{c10::kCPU};
  if (const auto accelerator = visible_accelerator()) {
    types.push_back(*accelerator);
  }
  for (auto type : types) {
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

c10::DeviceType device_type(const std::string& name,
                            const std::string& config) {
  try {
    return c10::Device(name).type();
  } catch (const c10::Error&) {
    throw std::invalid_argument(
        "backend \"" + config + "\": unknown device type \"" + name +
        "\"; allowed are cpu, cuda and LibTorch's other types, such as xpu");
  }
}

// Returns local_device() if `type` is the host's accelerator and this rank has
// a device of its own; otherwise none.
std::optional<c10::Device> device_for(c10::DeviceType type) {
  if (type == c10::kCPU || visible_accelerator() != type ||
      get_local_rank() >= at::accelerator::deviceCount()) {
    return {};
  }
  return local_device();
}

c10::intrusive_ptr<c10d::Backend> make_users_backend(
    const BackendCreator& creator, const BackendRequest& request) {
  const auto device = device_for(request.device_type);
  if (device) c10::impl::VirtualGuardImpl(device->type()).setDevice(*device);
  auto backend =
      creator({.store = request.store,
               .group_rank = request.rank,
               .group_size = request.size,
               .timeout = request.timeout,
               .group_id = request.group_name,
               .global_ranks_in_group = {request.global_ranks.begin(),
                                         request.global_ranks.end()}});
  if (!backend) {
    throw std::invalid_argument(
        "the backend's creator returned null; see register_backend()");
  }
  if (device && !backend->getBoundDeviceId()) {
    backend->setBoundDeviceId(device);
  }
  return backend;
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
    const auto type = device_type(device, config);
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

bool imagines_peers(const ProcessGroup& group) {
  return inside(group).is_apart() || imagines_peers(group.backend_config());
}

}  // namespace lockstep::internal

namespace lockstep {

void register_backend(const std::string& name, BackendCreator creator,
                      std::vector<c10::DeviceType> devices) {
  auto& entries = internal::registered_backends();
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument("register_backend: \"" + name + "\" " + why);
  };
  if (name.empty() || name.find_first_of(":,") != name.npos) {
    refuse("is not a name; give one without ':' and ','");
  }
  if (std::ranges::count(entries, name, &internal::BackendEntry::name) != 0) {
    refuse("is the name of another backend; give a name of its own");
  }
  if (devices.empty()) refuse("serves no device type; name one, such as xpu");
  if (!creator) refuse("has no creator; give a function that makes it");
  entries.push_back({.name = name,
                     .default_devices = devices,
                     .devices = std::move(devices),
                     .create = [creator = std::move(creator)](
                                   const internal::BackendRequest& request) {
                       return internal::make_users_backend(creator, request);
                     }});
}

}  // namespace lockstep
