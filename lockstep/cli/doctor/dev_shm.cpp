#include "lockstep/cli/doctor/dev_shm.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/cli/size_text.h"

namespace lockstep::internal {
namespace {

// Docker gives 64 MiB. NCCL needs about 10 MiB for each pair of GPUs that
// cannot reach each other directly, DataLoaders a batch for each worker.
constexpr int64_t kLittleSpace = int64_t{256} << 20;

// Returns why no file can be made in `folder`; 0 if one can.
int error_of_writing(const std::filesystem::path& folder) {
  std::string name = (folder / "lockstep_XXXXXX").string();
  const FileDescriptor fd(::mkostemp(name.data(), O_CLOEXEC));
  const int error = fd ? 0 : errno;
  if (fd) ::unlink(name.c_str());
  return error;
}

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
  if (const int error = error_of_writing(roots.dev / "shm"); error != 0) {
    finding.found +=
        std::string(", and it cannot be written: ") + std::strerror(error);
    finding.warn(
        "NCCL and Python's DataLoader make files there and fail (Lockstep does "
        "not): mount it writable for this user, mode 1777.");
    return finding;
  }
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
