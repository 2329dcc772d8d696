#include "lockstep/launch/process/visible_gpus.h"

#include <algorithm>
#include <cstdlib>

#include "lockstep/base/system_file.h"

namespace lockstep {
namespace {

bool is_whole_number(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return c >= '0' && c <= '9';
  });
}

}  // namespace

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
