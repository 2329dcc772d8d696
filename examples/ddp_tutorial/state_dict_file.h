#pragma once

#include <string>

#include <lockstep/checkpoint/snapshot.h>

namespace examples {

// Replaces the file at `path` as a whole by one that Python reads with
// model.load_state_dict(torch.load(path, weights_only=True)), and
// lockstep::read_snapshot() too: the tensors by their names and nothing else.
// One process, no communication. Throws as lockstep::write_snapshot().
void write_state_dict(const std::string& path,
                      const lockstep::NamedTensors& tensors);

}  // namespace examples
