#pragma once

#include "lockstep/checkpoint/atomic_file.h"
#include "lockstep/checkpoint/input_file.h"
#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// The safetensors format (https://huggingface.co/docs/safetensors, "Format"): 8
// bytes with the length N of the header, little-endian; N bytes of JSON; the
// tensors' bytes without gaps. The model's tensors have Python's names;
// everything else in a snapshot has names that begin with "lockstep."
// (docs/snapshots.md). They throw the errors of save_snapshot_file() and
// load_snapshot_file().
void write_safetensors(AtomicFile& file, const Snapshot& snapshot);
Snapshot read_safetensors(const InputFile& file);

// The reference implementation's limit for the header.
inline constexpr uint64_t kMostHeaderBytes = 100'000'000;

}  // namespace lockstep::internal
