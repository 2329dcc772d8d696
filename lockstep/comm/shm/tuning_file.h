#pragma once

#include <filesystem>
#include <vector>

#include "lockstep/comm/shm/protocol/tuning.h"

// Thresholds that were measured on this machine (`lockstep bench --tune`).
// Knows nothing of torch.
//
//   {"version": 1,
//    "tables": [{"ranks": 2, "one_shot_bytes": 4096, "chunk_bytes": 131072,
//                "streaming_bytes": 4194304}]}
//
// One table a number of ranks, 1 to 64; sizes as Tuning has them; no other
// fields.
namespace lockstep::shm {

struct TuningTable {
  int ranks;
  Tuning tuning;
};

// Throws std::invalid_argument with the path and what is wrong, also where
// there is no such file.
std::vector<TuningTable> read_tuning_file(const std::filesystem::path& path);

// Replaces the file at once; makes its folder where there is none. Throws
// std::invalid_argument if a table is not one that can be read,
// std::system_error if it cannot be written.
void write_tuning_file(const std::filesystem::path& path,
                       const std::vector<TuningTable>& tables);

// LOCKSTEP_TUNING, else lockstep/tuning.json in $XDG_CONFIG_HOME, or in
// ~/.config; empty if the environment has none of them.
std::filesystem::path tuning_file_path();

// For a group of `ranks`: the table for that many in the file at
// tuning_file_path(), or the nearest (the smaller of two); default_tuning()
// where there is no file or no table. A file that LOCKSTEP_TUNING names must be
// there. Throws as read_tuning_file().
Tuning choose_tuning(int ranks);

}  // namespace lockstep::shm
