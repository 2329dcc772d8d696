#include "tests/simulated_cuda/settings.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "tests/simulated_cuda/simulated_cuda.h"

namespace lockstep::internal::simulated_cuda {
namespace {

int number_of(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text && *text ? std::atoi(text) : otherwise;
}

std::vector<int> find_visible_devices() {
  const int count =
      std::clamp(number_of("SIMULATED_CUDA_DEVICES", 4), 0, kMostDevices);
  std::vector<int> visible;
  if (const char* const chosen = std::getenv("CUDA_VISIBLE_DEVICES")) {
    std::stringstream list(chosen);
    // As CUDA does, this stops at the first entry that is not a device.
    for (int device = 0; list >> device && device >= 0 && device < count;
         list.ignore(1, ',')) {
      visible.push_back(device);
    }
  } else {
    for (int device = 0; device < count; ++device) visible.push_back(device);
  }
  return visible;
}

const std::vector<int>& visible_devices() {
  static const auto* const visible =
      new std::vector<int>(find_visible_devices());
  return *visible;
}

}  // namespace

c10::DeviceIndex device_count() noexcept {
  return static_cast<c10::DeviceIndex>(visible_devices().size());
}

c10::DeviceIndex checked_index(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), kDeviceType,
              " error: invalid device ordinal: ", int{device},
              ", and there are ", int{device_count()}, " simulated devices");
  return device;
}

uint64_t initial_seed() {
  return static_cast<uint64_t>(number_of("SIMULATED_CUDA_SEED", 1));
}

int physical_index(c10::DeviceIndex device) {
  return visible_devices()[static_cast<size_t>(checked_index(device))];
}

}  // namespace lockstep::internal::simulated_cuda
