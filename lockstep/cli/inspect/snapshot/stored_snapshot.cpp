#include "lockstep/cli/inspect/snapshot/stored_snapshot.h"

namespace lockstep::internal {

std::unique_ptr<StoredSnapshot> StoredSnapshot::open(const std::string& path) {
  if (auto folder = open_stored_folder(path)) return folder;
  return open_stored_file(path);
}

}  // namespace lockstep::internal
