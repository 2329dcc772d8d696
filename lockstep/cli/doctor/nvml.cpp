#include "lockstep/cli/doctor/nvml.h"

#include <dlfcn.h>
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
#include "lockstep/launch/child_process.h"

namespace lockstep::internal {
namespace {

using nlohmann::json;

// A process that got SIGKILL ends within this time, unless the driver holds it.
constexpr std::chrono::milliseconds kKillTime{500};

// The part of NVML's interface that is used here (NVML API Reference Manual;
// its names, and numbers that never change). Its header comes with CUDA, which
// the build does not need.
using Device = struct OpaqueDevice*;
constexpr int kSuccess = 0;
constexpr int kNoPermission = 4;    // NVML_ERROR_NO_PERMISSION
constexpr int kPeerReads = 0;       // NVML_P2P_CAPS_INDEX_READ
constexpr int kPeerStatusGood = 0;  // NVML_P2P_STATUS_OK
struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

struct Unloader {
  void operator()(void* library) const { dlclose(library); }
};

class Nvml {
 public:
  explicit Nvml(void* library) : library_(library) {
    check(call<int()>("nvmlInit_v2")());
    started_ = true;
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;
  ~Nvml() {
    if (started_) call<int()>("nvmlShutdown")();
  }

  std::string driver() {
    return text([this](char* to, unsigned size) {
      return call<int(char*, unsigned)>("nvmlSystemGetDriverVersion")(to, size);
    });
  }

  // Returns those that this process may use.
  std::vector<Device> devices() {
    unsigned count = 0;
    check(call<int(unsigned*)>("nvmlDeviceGetCount_v2")(&count));
    std::vector<Device> usable;
    for (unsigned i = 0; i < count; ++i) {
      Device device = nullptr;
      const int result = call<int(unsigned, Device*)>(
          "nvmlDeviceGetHandleByIndex_v2")(i, &device);
      if (result == kNoPermission) continue;
      check(result);
      usable.push_back(device);
    }
    return usable;
  }

  NvmlAnswer::Gpu describe(Device device) {
    const std::string name = text([&](char* to, unsigned size) {
      return call<int(Device, char*, unsigned)>("nvmlDeviceGetName")(device, to,
                                                                     size);
    });
    // A GPU that shares the host's memory does not tell this.
    Memory memory{};
    call<int(Device, Memory*)>("nvmlDeviceGetMemoryInfo")(device, &memory);
    return {name, static_cast<int64_t>(memory.total)};
  }

  // Returns true, too, if the driver does not tell, as for parts of a GPU.
  bool reads(Device from, Device to) {
    int status = kPeerStatusGood;
    call<int(Device, Device, int, int*)>("nvmlDeviceGetP2PStatus")(
        from, to, kPeerReads, &status);
    return status == kPeerStatusGood;
  }

 private:
  template <typename Function>
  Function* call(const char* name) {
    void* found = dlsym(library_, name);
    if (found == nullptr) {
      throw std::runtime_error(std::string("NVML lacks ") + name);
    }
    return reinterpret_cast<Function*>(found);
  }

  template <typename Ask>
  std::string text(const Ask& ask) {
    std::array<char, 96> bytes{};  // NVML_DEVICE_NAME_V2_BUFFER_SIZE
    check(ask(bytes.data(), static_cast<unsigned>(bytes.size())));
    return bytes.data();
  }

  void check(int result) {
    if (result == kSuccess) return;
    throw std::runtime_error(call<const char*(int)>("nvmlErrorString")(result));
  }

  void* library_;
  bool started_ = false;
};

// Returns what ask_nvml() returns, as JSON; null for nothing.
json ask_here(const std::string& name) {
  const std::unique_ptr<void, Unloader> library(
      dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL));
  if (!library) return nullptr;
  json answer{{"error", ""},
              {"driver", ""},
              {"gpus", json::array()},
              {"apart", json::array()}};
  try {
    Nvml nvml(library.get());
    answer["driver"] = nvml.driver();
    const auto devices = nvml.devices();
    for (size_t i = 0; i < devices.size(); ++i) {
      const auto gpu = nvml.describe(devices[i]);
      answer["gpus"].push_back({gpu.name, gpu.memory_bytes});
      for (size_t other = 0; other < i; ++other) {
        if (nvml.reads(devices[i], devices[other]) &&
            nvml.reads(devices[other], devices[i])) {
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
