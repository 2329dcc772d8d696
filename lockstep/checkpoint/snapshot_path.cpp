#include "lockstep/checkpoint/snapshot_path.h"

#include <filesystem>
#include <stdexcept>

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

bool is_directory(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

SnapshotForm form_of(const std::string& path, bool is_folder) {
  const std::string extension = fs::path(path).extension();
  if (is_folder) return SnapshotForm::kFolder;
  if (extension == ".pt" || extension == ".pth") return SnapshotForm::kPt;
  if (extension == ".safetensors") return SnapshotForm::kSafetensors;
  if (extension.empty() && !path.empty()) return SnapshotForm::kFolder;
  throw std::invalid_argument(
      "\"" + path +
      "\" cannot be the name of a snapshot: a file ends in .pt or .pth (the "
      "format of torch.save) or in .safetensors; a folder of snapshots ends in "
      "\"/\", has no extension, or exists");
}

}  // namespace

SnapshotForm form_of(const std::string& path) {
  return form_of(path, path.ends_with('/') || is_directory(path));
}

SnapshotForm form_of(const std::string& path, const Ranks& ranks) {
  if (path.ends_with('/')) return SnapshotForm::kFolder;
  return form_of(path,
                 !ranks.share(is_directory(path) ? "folder" : "", 0).empty());
}

}  // namespace lockstep::internal
