#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/checkpoint/sharded/save_files.h"

// A folder of snapshots: which there are, and how one is added, linked and
// removed. Each snapshot is a folder in it, "000012-step-3400": the number of
// the save, which orders them, and the optimizer steps. Used by the first rank
// only.
namespace lockstep::internal {

struct SnapshotEntry {
  std::string path;
  int64_t number = 0;
  int64_t step = 0;
  bool is_link = false;
};

// Returns the snapshots in `folder`, newest first. Nothing in them is looked
// at; a symbolic link may point to a folder that is missing. Returns none if
// there is no such folder.
std::vector<SnapshotEntry> snapshots_in(const std::string& folder);

// Returns `path` without slashes at its end.
std::string folder_of_path(const std::string& path);

// Returns whether `folder` is one snapshot or has weights. A folder of
// snapshots may have weights, too, which do not count there.
bool holds_tensors(const std::string& folder);

// Returns the newest snapshot in `path`; `path` itself if there is none,
// because it is one snapshot or has weights.
std::string snapshot_at(const std::string& path);

// Makes the folder and those above it, if they are missing.
void make_folders(SaveFiles& files, const std::string& folder);

// Throws an error with the path and the cause unless a snapshot can be saved in
// `folder`, which is made if it is missing: std::invalid_argument if it is one
// snapshot, or has weights and no snapshots. Leaves nothing else.
void check_can_save_in(const std::string& folder);

// A snapshot that is being written: a folder with a temporary name
// (".save.lockstep-XXXXXXXXXXXXXXXX.tmp"), which is renamed when everything in
// it is on the disk. A killed process leaves it behind. The process that writes
// holds a lock (flock) on the file ".lock" in it as long as it lives, so the
// next save can tell which folders are left over, and removes them. (NFS has
// locks of files, not of folders.)
class SnapshotBeingSaved {
 public:
  // Makes the folder of snapshots if it is missing, and the temporary one.
  // Throws std::invalid_argument as check_can_save_in() does.
  SnapshotBeingSaved(SaveFiles& files, const std::string& folder);

  // Removes the temporary folder unless commit() has succeeded.
  ~SnapshotBeingSaved();

  SnapshotBeingSaved(const SnapshotBeingSaved&) = delete;
  SnapshotBeingSaved& operator=(const SnapshotBeingSaved&) = delete;

  // The temporary folder. Its files must be on the disk before commit().
  const std::string& path() const { return aside_; }

  // Blocks until the snapshot is on the disk under its name, and returns its
  // path. Throws std::system_error; if that is after the renaming, the snapshot
  // is complete, but may not survive a power failure.
  std::string commit(int64_t step);

 private:
  SaveFiles& files_;
  std::string folder_;
  std::string aside_;  // empty after it was renamed or removed
  FileDescriptor lock_;
};

// Lets the link `latest` in the folder of the snapshot at `path` point to it.
// Does nothing if the file system has no symbolic links, and warns once if
// `latest` is a directory.
void link_latest(SaveFiles& files, const std::string& path);

// Removes all snapshots in `folder` but the newest `keep_last` that are
// complete, those whose step is a multiple of `keep_every` (0 means no step),
// those that are symbolic links, and those that are not complete. Of complete
// ones that follow each other with the same step, because a save was repeated,
// only the newest counts (unless the step is 0), so keep_last steps stay.
// Removes nothing if `keep_last` is 0. A snapshot is renamed
// (".old.lockstep-XXXXXXXXXXXXXXXX.tmp") before its files are removed, so none
// ever exists in part. Warns, once, of one that cannot be removed; its rest has
// a temporary name then, and is removed by a later save if that can.
void remove_old_snapshots(SaveFiles& files, const std::string& folder,
                          int64_t keep_last, int64_t keep_every);

}  // namespace lockstep::internal
