#include "lockstep/cli/doctor/dev_shm.h"

#include <sys/statvfs.h>

#include <cstdint>

#include "lockstep/cli/size_text.h"

namespace lockstep::internal {
namespace {

// Docker gives 64 MiB. NCCL needs about 10 MiB for each pair of GPUs that
// cannot reach each other directly, DataLoaders a batch for each worker.
constexpr int64_t kLittleSpace = int64_t{256} << 20;

}  // namespace

Finding check_dev_shm(const MachineRoots& roots) {
  Finding finding{.name = "/dev/shm"};
  struct statvfs space {};
  if (::statvfs((roots.dev / "shm").c_str(), &space) != 0) {
    finding.found = "is missing";
    finding.warn(
        "NCCL and Python's DataLoader share memory there (Lockstep does not): "
        "mount -t tmpfs -o size=50% tmpfs /dev/shm.");
    return finding;
  }
  const auto block = static_cast<int64_t>(space.f_frsize);
  const auto size = static_cast<int64_t>(space.f_blocks) * block;
  const auto free = static_cast<int64_t>(space.f_bavail) * block;
  finding.values = {{"size_bytes", size}, {"free_bytes", free}};
  finding.found = size_text(free) + " of " + size_text(size) + " are free";
  if (free < kLittleSpace) {
    finding.warn(
        "NCCL and Python's DataLoader share memory there and fail when it is "
        "full (Lockstep does not use it): docker --shm-size=8g or --ipc=host, "
        "in Kubernetes a volume of the medium Memory at /dev/shm, elsewhere "
        "mount -o remount,size=50% /dev/shm.");
  }
  return finding;
}

}  // namespace lockstep::internal
