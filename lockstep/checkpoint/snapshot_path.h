#pragma once

#include <string>

#include "lockstep/checkpoint/ranks.h"

namespace lockstep::internal {

// What a path is the name of, by the one rule that every function follows:
// ".pt" and ".pth" are files of torch.save, ".safetensors" is itself; a path
// that ends in "/", has no extension or is an existing directory is a folder of
// snapshots. (A file that is only read may have any name: its content decides.)
enum class SnapshotForm { kPt, kSafetensors, kFolder };

// Throws std::invalid_argument for any other extension.
SnapshotForm form_of(const std::string& path);

// The same on all ranks, of which the first looks whether there is such a
// directory. Collective.
SnapshotForm form_of(const std::string& path, const Ranks& ranks);

}  // namespace lockstep::internal
