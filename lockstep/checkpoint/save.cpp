#include "lockstep/checkpoint/save.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <system_error>

#include "lockstep/checkpoint/file_save.h"
#include "lockstep/checkpoint/ranks.h"
#include "lockstep/checkpoint/sharded/sharded_save.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

bool is_directory(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

bool is_file(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

// Returns the form of a file with this name; none if no file has it.
std::optional<SnapshotForm> form_by_name(const std::string& path) {
  const std::string extension = fs::path(path).extension();
  if (extension == ".pt" || extension == ".pth") return SnapshotForm::kPt;
  if (extension == ".safetensors") return SnapshotForm::kSafetensors;
  return std::nullopt;
}

[[noreturn]] void refuse_name(const std::string& path) {
  throw std::invalid_argument(
      "\"" + path +
      "\" cannot be the name of a snapshot: a file ends in .pt or .pth (the "
      "format of torch.save) or in .safetensors; a folder of snapshots ends in "
      "\"/\", has no extension, or exists");
}

bool may_be_new_folder(const std::string& path) {
  return !path.empty() && !fs::path(path).has_extension();
}

}  // namespace

void require_savable(const std::string& path, const TrainingState& state,
                     const SnapshotOptions& options, const Ranks& ranks) {
  const bool folder = names_folder(path, ranks);
  const auto all = gather_or_fail(
      ranks,
      [&](nlohmann::json& mine) {
        if (folder) {
          mine["claims"] = claims_before_training(state, options);
          return;
        }
        // The first rank saves; the others' parts are only compared, and may be
        // missing.
        if (ranks.rank() == 0 || state.model) {
          check_for_file(path, state, options, ranks.size());
        }
        mine["claims"] = file_claims_of(state);
      },
      failed_save(path, "cannot be saved"));
  std::vector<nlohmann::json> claims;
  for (const auto& rank : all) claims.push_back(rank.at("claims"));
  // This process alone has no parts of the other ranks to compare with.
  if (ranks.are_imagined()) return;
  folder ? require_same_training(claims) : require_same_in_file(claims);
}

std::unique_ptr<Save> begin_save(const std::string& path,
                                 const TrainingState& state,
                                 const SnapshotOptions& options,
                                 const Ranks& ranks, SaveFiles& files) {
  if (names_folder(path, ranks)) {
    return std::make_unique<ShardedSave>(path, state, options, ranks, files);
  }
  return std::make_unique<FileSave>(path, state, options, ranks);
}

SnapshotForm form_of(const std::string& path) {
  if (path.ends_with('/') || is_directory(path)) return SnapshotForm::kFolder;
  if (const auto form = form_by_name(path)) return *form;
  if (may_be_new_folder(path)) return SnapshotForm::kFolder;
  refuse_name(path);
}

bool names_folder(const std::string& path, const Ranks& ranks, bool only_read) {
  if (path.ends_with('/')) return true;
  if (form_by_name(path)) return is_directory(path);
  const std::string seen = ranks.share(is_directory(path)           ? "folder"
                                       : only_read && is_file(path) ? "file"
                                                                    : "",
                                       0);
  if (seen.empty() && !may_be_new_folder(path)) refuse_name(path);
  return seen != "file";
}

}  // namespace lockstep::internal
