// Stands for libnvidia-ml.so.1, with the functions that `lockstep doctor`
// calls. FAKE_NVML: "2" (two GPUs that reach each other), "3 apart" (GPU 2
// cannot read the others), "3 denied" (this process may not use GPU 1),
// "mismatch" (fails as after an update of the driver), "silent" (never
// answers).
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

std::string behaviour() {
  const char* text = std::getenv("FAKE_NVML");
  return text == nullptr ? "0" : text;
}

// A device is its number plus one.
uintptr_t number_of(void* device) {
  return reinterpret_cast<uintptr_t>(device) - 1;
}

}  // namespace

extern "C" {

int nvmlInit_v2() {
  if (behaviour() == "silent") {
    while (true) pause();
  }
  if (behaviour() == "crash") std::abort();
  return behaviour() == "mismatch" ? 18 : 0;
}

int nvmlShutdown() { return 0; }

const char* nvmlErrorString(int) { return "Driver/library version mismatch"; }

int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::snprintf(text, size, "580.82.07");
  return 0;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(std::atoi(behaviour().c_str()));
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (behaviour() == "3 denied" && index == 1) return 4;
  *device = reinterpret_cast<void*>(uintptr_t{index} + 1);
  return 0;
}

int nvmlDeviceGetName(void* device, char* text, unsigned size) {
  std::snprintf(text, size, "GPU kind %d", number_of(device) == 2 ? 2 : 1);
  return 0;
}

int nvmlDeviceGetMemoryInfo(void*, unsigned long long* total_free_used) {
  total_free_used[0] = 80ULL << 30;
  return 0;
}

int nvmlDeviceGetP2PStatus(void* from, void*, int index, int* status) {
  if (index != 0) return 2;  // not the question for reads
  *status = behaviour() == "3 apart" && number_of(from) == 2 ? 4 : 0;
  return 0;
}

}  // extern "C"
