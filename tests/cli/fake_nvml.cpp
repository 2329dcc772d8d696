// Stands for libnvidia-ml.so.1, with the functions that Lockstep calls.
// FAKE_NVML: "2" (two GPUs that reach each other), "3 apart" (GPU 2
// cannot read the others), "3 denied" (this process may not use GPU 1),
// "mismatch" (fails as after an update of the driver), "silent" (never
// answers). With "2 busy" the calling process computes on the GPU of its
// LOCAL_RANK and another process on all; with "2 spread" it computes on all;
// with "2 secretive" too, but GPU 1 tells no figures.
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

struct ProcessInfo {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance;
  unsigned compute_instance;
};

int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count,
                                            ProcessInfo* processes) {
  const char* const rank = std::getenv("LOCAL_RANK");
  const bool own =
      behaviour() == "2 spread" || behaviour() == "2 secretive" ||
      (behaviour() == "2 busy" &&
       number_of(device) ==
           static_cast<uintptr_t>(std::atoi(rank == nullptr ? "0" : rank)));
  const unsigned room = *count;
  *count = own ? 2 : 1;
  if (room < *count) return 7;
  processes[0] = {1, 5ULL << 30, 0, 0};
  if (own) {
    const bool silent = behaviour() == "2 secretive" && number_of(device) == 1;
    processes[1] = {static_cast<unsigned>(getpid()),
                    silent ? ~0ULL : (1ULL << 30) + number_of(device), 0, 0};
  }
  return 0;
}

int nvmlDeviceGetUtilizationRates(void* device, unsigned* gpu_and_memory) {
  if (behaviour() == "2 secretive" && number_of(device) == 1) return 3;
  gpu_and_memory[0] = 30 + 10 * static_cast<unsigned>(number_of(device));
  return 0;
}

int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
  if (behaviour() == "2 secretive" && number_of(device) == 1) return 3;
  *milliwatts = 200'000 + 500 * static_cast<unsigned>(number_of(device));
  return 0;
}

int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* celsius) {
  if (sensor != 0) return 2;
  if (behaviour() == "2 secretive" && number_of(device) == 1) return 3;
  *celsius = 61 - static_cast<unsigned>(number_of(device));
  return 0;
}

}  // extern "C"
