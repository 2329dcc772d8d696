#include "lockstep/cli/doctor/temporary_files.h"

#include <stdexcept>
#include <string>

#include "lockstep/base/environment.h"
#include "lockstep/launch/process/run_directory.h"

namespace lockstep::internal {

Finding check_temporary_files() {
  Finding finding{.name = "TMPDIR"};
  const auto wanted = get_env("TMPDIR");
  finding.values = {
      {"TMPDIR", wanted ? nlohmann::ordered_json(*wanted) : nullptr},
      {"folder", nullptr}};
  try {
    const TemporaryPlace place = find_temporary_place();
    finding.values["folder"] = place.folder.string();
    finding.found = "temporary files go to " + place.folder.string();
    if (!place.refused.empty()) {
      finding.found += ", as nothing can be written in " + place.refused;
      finding.warn(
          "lockstep run and Python take the next folder; other programs may "
          "fail. Make the folder, free space in it, or set TMPDIR to another.");
    }
    if (wanted && !wanted->starts_with('/')) {
      finding.warn("TMPDIR is \"" + *wanted +
                   "\", which a program that changes its directory does not "
                   "find again; give an absolute path.");
    }
  } catch (const std::invalid_argument& error) {
    finding.found = error.what();
    finding.fail(
        "lockstep run cannot start without one, except with "
        "--log-dir.");
  }
  return finding;
}

}  // namespace lockstep::internal
