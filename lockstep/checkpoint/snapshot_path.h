#pragma once

#include <string>

#include "lockstep/checkpoint/ranks.h"

namespace lockstep::internal {

// The kind of snapshot that a path names, by the rule of every function:
// ".pt" and ".pth" are files of torch.save, ".safetensors" is itself; a path
// that ends in "/", has no extension or is an existing directory is a folder of
// snapshots. (A file that is only read may have any name: its content decides.)
enum class SnapshotForm { kPt, kSafetensors, kFolder };

// Throws std::invalid_argument for any other extension.
SnapshotForm form_of(const std::string& path);

// Whether it is kFolder. If the name alone does not say it, the first rank
// looks for all, and the call is collective. `only_read`: an existing file, of
// any name, is not a folder, and is not an error.
bool names_folder(const std::string& path, const Ranks& ranks,
                  bool only_read = false);

}  // namespace lockstep::internal
