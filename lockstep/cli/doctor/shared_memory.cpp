#include "lockstep/cli/doctor/shared_memory.h"

#include <system_error>

#include "lockstep/base/shared_memory.h"
#include "lockstep/cli/size_text.h"

namespace lockstep::internal {
namespace {

// About what two ranks reserve when their group begins.
constexpr size_t kTriedBytes = size_t{4} << 20;

}  // namespace

Finding check_shared_memory() {
  Finding finding{.name = "shared memory"};
  finding.values = {{"tried_bytes", kTriedBytes}};
  try {
    SharedMemory::create(kTriedBytes);
    finding.found =
        size_text(kTriedBytes) + " could be reserved (memfd_create)";
  } catch (const std::system_error& error) {
    finding.found = error.what();
    finding.warn(
        "Ranks of this host talk through Gloo instead, many times slower. "
        "Raise the limit that is named; if none is, let the sandbox allow "
        "memfd_create, or free memory.");
  }
  return finding;
}

}  // namespace lockstep::internal
