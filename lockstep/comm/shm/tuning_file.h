#pragma once

#include <filesystem>
#include <vector>

#include "lockstep/comm/shm/protocol/tuning.h"

// Reads and writes the file of thresholds that `lockstep bench --tune` measures
// on this machine. Knows nothing of torch.
//
//   {"version": 1,
//    "tables": [{"ranks": 2, "one_shot_bytes": 4096, "chunk_bytes": 131072,
//                "streaming_bytes": 4194304}]}
//
// There is one table for each number of ranks, from 1 to 64. The sizes are
// those of Tuning. No other fields are allowed.
namespace lockstep::shm {

struct TuningTable {
  int ranks;
  Tuning tuning;
};

// Throws std::invalid_argument with the path and what is wrong, also if there
// is no such file.
std::vector<TuningTable> read_tuning_file(const std::filesystem::path& path);

// Replaces the file by renaming a new one, and makes its folder if there is
// none. Throws std::invalid_argument if a table is not one that
// read_tuning_file() takes, std::system_error if the file cannot be written.
void write_tuning_file(const std::filesystem::path& path,
                       const std::vector<TuningTable>& tables);

// Returns LOCKSTEP_TUNING, else lockstep/tuning.json in $XDG_CONFIG_HOME, or in
// ~/.config; empty if the environment has none of them.
std::filesystem::path tuning_file_path();

// Returns the tuning for a group of `ranks` from the file at
// tuning_file_path(): the table for that many ranks or, if there is none, the
// nearest (of two, the smaller). Returns default_tuning() if there is no file
// or no table. A file that LOCKSTEP_TUNING names must be there. Throws as
// read_tuning_file() does.
Tuning choose_tuning(int ranks);

}  // namespace lockstep::shm
