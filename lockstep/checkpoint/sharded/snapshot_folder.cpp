#include "lockstep/checkpoint/sharded/snapshot_folder.h"

#include <c10/util/Exception.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <tuple>
#include <utility>

#include "lockstep/checkpoint/disk_file.h"
#include "lockstep/checkpoint/sharded/manifest.h"
#include "lockstep/checkpoint/sharded/tensor_files.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

// Snapshots that are being saved, and old ones that are being removed.
constexpr const char* kAsideTarget = "save";
constexpr const char* kOldTarget = "old";
constexpr const char* kLockName = ".lock";
constexpr const char* kLatest = "latest";
constexpr std::string_view kStepInfix = "-step-";
constexpr size_t kFewestDigits = 6;

std::string name_of_snapshot(int64_t number, int64_t step) {
  std::string digits = std::to_string(number);
  if (digits.size() < kFewestDigits) {
    digits.insert(0, kFewestDigits - digits.size(), '0');
  }
  return digits + std::string(kStepInfix) + std::to_string(step);
}

std::optional<SnapshotEntry> entry_named(const std::string& name) {
  SnapshotEntry entry;
  const char* const end = name.data() + name.size();
  const auto number = std::from_chars(name.data(), end, entry.number);
  const std::string_view rest(number.ptr, end);
  if (number.ec != std::errc() || !rest.starts_with(kStepInfix)) {
    return std::nullopt;
  }
  const auto step =
      std::from_chars(number.ptr + kStepInfix.size(), end, entry.step);
  // So another spelling of the numbers ("1-step-+1") is not a snapshot.
  if (step.ec != std::errc() ||
      name_of_snapshot(entry.number, entry.step) != name) {
    return std::nullopt;
  }
  return entry;
}

bool is_one_snapshot(const std::string& folder) {
  std::error_code error;
  return fs::exists(folder + "/" + kManifestName, error);
}

// Throws std::invalid_argument if load_snapshot() would not look for snapshots
// in `folder`, or would find only those of this run there.
void require_folder_of_snapshots(const std::string& folder) {
  if (is_one_snapshot(folder)) {
    throw std::invalid_argument(
        "\"" + folder +
        "\" is a snapshot itself; save in the folder that it is in");
  }
  if (snapshots_in(folder).empty() && holds_tensors(folder)) {
    throw std::invalid_argument(
        "\"" + folder +
        "\" holds weights in safetensors, which snapshots beside them would "
        "hide; save in another folder");
  }
}

// Looks only whether each file that the manifest lists exists with the right
// size.
bool is_complete(const std::string& path) {
  try {
    const std::string text = text_of_file(path + "/" + kManifestName);
    for (const WrittenFile& file : manifest_of(text).files) {
      if (fs::file_size(path + "/" + file.name) != file.bytes) return false;
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void remove_with_content(SaveFiles& files, const std::string& folder);

// Removes all that is in a folder, also what the user has put there, except a
// file of the name `stays`.
void remove_content(SaveFiles& files, const std::string& folder,
                    const std::string& stays = "") {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code ignored;
    if (it->path().filename() == stays) continue;
    if (fs::is_directory(it->symlink_status(ignored))) {
      remove_with_content(files, it->path().string());
    } else {
      files.remove_file(it->path().string());
    }
  }
}

void remove_with_content(SaveFiles& files, const std::string& folder) {
  remove_content(files, folder);
  files.remove_folder(folder);
}

// Whether `path` is still the name of the file that was opened. (NFS gives a
// file that is open another name instead of removing it.)
bool has_name(const FileDescriptor& file, const std::string& path) {
  struct stat opened {};
  struct stat named {};
  return ::fstat(file.get(), &opened) == 0 &&
         ::stat(path.c_str(), &named) == 0 && opened.st_dev == named.st_dev &&
         opened.st_ino == named.st_ino;
}

// Removes the folder of a save whose lock this process holds. Only the holder
// removes or writes other files in it, so the lock's file goes last. If the
// process that made the folder makes and locks a new file meanwhile, the folder
// is not empty and stays.
void remove_save(SaveFiles& files, const std::string& folder,
                 FileDescriptor lock) {
  remove_content(files, folder, kLockName);
  files.remove_file(folder + "/" + kLockName);
  lock.reset();  // NFS keeps a file that is open under another name
  files.remove_folder(folder);
}

// Removes what killed saves have left, and what could not be removed before.
// What cannot be removed now either stays.
void remove_left_overs_in(SaveFiles& files, const std::string& folder) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    try {
      const std::string path = it->path().string();
      if (is_aside_name(name, kLatest)) files.remove_file(path);
      if (!fs::is_directory(it->symlink_status())) continue;
      if (is_aside_name(name, kOldTarget)) remove_with_content(files, path);
      if (!is_aside_name(name, kAsideTarget)) continue;
      const std::string lock = path + "/" + kLockName;
      FileDescriptor left = files.open_lock(lock);
      // If the lock is held, that save is still running. If the file is gone,
      // another job removes the folder.
      if (::flock(left.get(), LOCK_EX | LOCK_NB) == 0 && has_name(left, lock)) {
        remove_save(files, path, std::move(left));
      }
    } catch (const std::system_error&) {
      // Another user's, say: no reason to refuse the save.
    }
  }
}

}  // namespace

std::string folder_of_path(const std::string& path) {
  size_t size = path.size();
  while (size > 1 && path[size - 1] == '/') --size;
  return path.substr(0, size);
}

bool holds_tensors(const std::string& folder) {
  std::error_code error;
  if (is_one_snapshot(folder)) return true;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    if (it->path().extension() == ".safetensors") return true;
  }
  return false;
}

std::string snapshot_at(const std::string& path) {
  const std::string folder = folder_of_path(path);
  const auto entries = snapshots_in(folder);
  return entries.empty() ? folder : entries.front().path;
}

std::vector<SnapshotEntry> snapshots_in(const std::string& folder) {
  std::vector<SnapshotEntry> entries;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    auto entry = entry_named(it->path().filename().string());
    if (!entry) continue;
    std::error_code ignored;
    entry->is_link = fs::is_symlink(it->symlink_status(ignored));
    // A link to a folder that is missing now is listed, too.
    if (entry->is_link ? fs::is_regular_file(it->status(ignored))
                       : !fs::is_directory(it->symlink_status(ignored))) {
      continue;
    }
    entry->path = it->path().string();
    entries.push_back(std::move(*entry));
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw std::system_error(error, "the snapshots in \"" + folder +
                                       "\" cannot be "
                                       "listed");
  }
  // Two jobs that save in one folder at the same time may use a number twice.
  std::sort(entries.begin(), entries.end(),
            [](const SnapshotEntry& a, const SnapshotEntry& b) {
              return std::tie(a.number, a.step) > std::tie(b.number, b.step);
            });
  return entries;
}

void make_folders(SaveFiles& files, const std::string& folder) {
  std::error_code error;
  if (folder.empty() || fs::is_directory(folder, error)) return;
  const std::string above =
      folder_of_path(fs::path(folder).parent_path().string());
  make_folders(files, above);
  try {
    files.make_folder(folder);
  } catch (const std::system_error& failure) {
    // Another process may have made it in the meantime.
    if (failure.code() != std::errc::file_exists ||
        !fs::is_directory(folder, error)) {
      throw;
    }
  }
  files.sync_folder(above.empty() ? "." : above);
}

void check_can_save_in(const std::string& folder) {
  SaveFiles files;
  try {
    make_folders(files, folder);
    const SnapshotBeingSaved tried(files, folder);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(error.what()) +
                                ", or, in a run that only reads, set "
                                "LoadSnapshotOptions::will_save to false");
  } catch (const std::system_error& error) {
    throw std::system_error(
        error.code(),
        "no snapshot can be saved in \"" + folder +
            "\"; let rank 0 make and write that folder, name another path, or, "
            "in a run that only reads, set LoadSnapshotOptions::will_save to "
            "false");
  }
}

SnapshotBeingSaved::SnapshotBeingSaved(SaveFiles& files,
                                       const std::string& folder)
    : files_(files), folder_(folder) {
  make_folders(files_, folder_);
  require_folder_of_snapshots(folder_);
  remove_left_overs_in(files_, folder_);
  for (;;) {
    const std::string aside = folder_ + "/" + aside_name(kAsideTarget);
    files_.make_folder(aside);
    // Before the folder is locked, another job's save may take it for left over
    // and remove it; then a new one is made. That save may have done so before
    // we open the file, or have its lock, or have removed the file and given
    // the lock back.
    const std::string lock = aside + "/" + kLockName;
    try {
      lock_ = files_.open_lock(lock);
    } catch (const std::system_error& error) {
      if (error.code() == std::errc::no_such_file_or_directory) continue;
      files_.remove_folder(aside);
      throw;
    }
    // If the file system has no locks, folders that killed processes left
    // behind stay. If each host has locks of its own (NFS without a lock
    // service), another host may remove what is in this one, which the save
    // notices before it commits.
    if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      continue;
    }
    if (!has_name(lock_, lock)) continue;
    aside_ = aside;
    return;
  }
}

SnapshotBeingSaved::~SnapshotBeingSaved() {
  if (aside_.empty()) return;
  try {
    remove_save(files_, aside_, std::move(lock_));
  } catch (const std::exception&) {
    // The next save removes it.
  }
}

std::string SnapshotBeingSaved::commit(int64_t step) {
  files_.sync_folder(aside_);
  const auto before = snapshots_in(folder_);
  int64_t number = before.empty() ? 1 : before.front().number + 1;
  std::string path;
  for (;; ++number) {
    path = folder_ + "/" + name_of_snapshot(number, step);
    try {
      files_.rename(aside_, path);
      break;
    } catch (const std::system_error& error) {
      // Another job has saved in the meantime, or the name is that of a link or
      // a file.
      std::error_code ignored;
      const bool is_taken = error.code() == std::errc::directory_not_empty ||
                            error.code() == std::errc::file_exists ||
                            (error.code() == std::errc::not_a_directory &&
                             fs::exists(fs::symlink_status(path, ignored)));
      if (!is_taken) throw;
    }
  }
  aside_.clear();
  files_.sync_folder(folder_);
  // Not before the renaming: another job takes a folder without this file for
  // left over.
  lock_.reset();
  try {
    files_.remove_file(path + "/" + kLockName);
  } catch (const std::system_error&) {
    // A snapshot with this file is whole, too.
  }
  return path;
}

void link_latest(SaveFiles& files, const std::string& path) {
  const fs::path snapshot(path);
  const std::string folder = snapshot.parent_path().string();
  for (;;) {
    const std::string aside = folder + "/" + aside_name(kLatest);
    try {
      files.link(snapshot.filename().string(), aside);
    } catch (const std::system_error& error) {
      const int cause = error.code().value();
      if (cause == EPERM || cause == EOPNOTSUPP || cause == ENOSYS) return;
      throw;
    }
    try {
      files.rename(aside, folder + "/" + kLatest);
      break;
    } catch (const std::system_error& error) {
      if (error.code() == std::errc::is_a_directory) {
        // A copy of the folder, which some programs make without links.
        files.remove_file(aside);
        TORCH_WARN_ONCE("lockstep: \"", folder, "/", kLatest,
                        "\" is a directory, so it cannot be the link to the "
                        "newest snapshot; remove it");
        return;
      }
      // A link has no lock, so another job's save may have taken this one for
      // left over and removed it. If the folder is gone, link() says so.
      if (error.code() != std::errc::no_such_file_or_directory) throw;
    }
  }
  files.sync_folder(folder);
}

void remove_old_snapshots(SaveFiles& files, const std::string& folder,
                          int64_t keep_last, int64_t keep_every) {
  if (keep_last == 0) return;
  int64_t kept = 0;
  std::optional<int64_t> newer_step;  // of the last one that is complete
  for (const SnapshotEntry& entry : snapshots_in(folder)) {
    const bool stays = entry.is_link || (keep_every > 0 && entry.step > 0 &&
                                         entry.step % keep_every == 0);
    // Looking into a manifest takes time, and these may be many.
    if (stays && kept >= keep_last) continue;
    if (!is_complete(entry.path)) continue;
    // A program that does not count its steps saves all in step 0.
    const bool is_repeated = entry.step > 0 && newer_step == entry.step;
    newer_step = entry.step;
    if (is_repeated ? stays : kept++ < keep_last) continue;
    const std::string aside = folder + "/" + aside_name(kOldTarget);
    try {
      files.rename(entry.path, aside);
      remove_with_content(files, aside);
    } catch (const std::system_error& error) {
      TORCH_WARN_ONCE("lockstep: the old snapshot \"", entry.path,
                      "\" cannot be removed, and the next save tries again: ",
                      error.what());
    }
  }
}

}  // namespace lockstep::internal
