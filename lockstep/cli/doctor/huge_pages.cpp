#include "lockstep/cli/doctor/huge_pages.h"
#include "lockstep/launch/process/system_file.h"

namespace lockstep::internal {

Finding check_huge_pages(const MachineRoots& roots) {
  Finding finding{.name = "huge pages"};
  const auto folder = roots.sys / "kernel/mm/transparent_hugepage";
  const auto own = chosen_word(folder / "enabled");
  const auto shared = chosen_word(folder / "shmem_enabled");
  if (!own || !shared) {
    finding.found = "the kernel gives none by itself";
    return finding;
  }
  finding.values = {{"own_memory", *own}, {"shared_memory", *shared}};
  finding.found =
      "\"" + *own + "\" for own memory, \"" + *shared + "\" for shared memory";
  if (*shared == "never" || *shared == "deny") {
    finding.advise(Health::ok,
                   "Shared memory gets some after, as root: echo advise > " +
                       (folder / "shmem_enabled").string());
  }
  return finding;
}

}  // namespace lockstep::internal
