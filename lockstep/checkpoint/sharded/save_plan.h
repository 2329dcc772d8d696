#pragma once

#include <c10/core/ScalarType.h>

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "lockstep/checkpoint/sharded/tensor_shard.h"

// Which rank writes what. Planning writes nothing: every rank tells the others
// what it has, and all make the same plan from that.
namespace lockstep::internal {

// Returns what this rank tells the others of its shards: names, dtypes, shapes
// and boxes, no elements. Throws std::invalid_argument for a dtype that
// safetensors lacks, for a name that occurs twice, and for a shard that does
// not fit its placement.
nlohmann::json claims_of(const std::vector<TensorShard>& shards);

struct SavePlan {
  struct Tensor {
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    Sizes shape;
    std::string placement;  // text_of(Placement)
  };
  struct Part {
    std::string name;
    Box box;
    // The rank that writes the part, and in which of its files. A file has at
    // most one part of a tensor, because the names in it must differ.
    size_t rank = 0;
    size_t file = 0;
    // Index in `holders`.
    size_t held_by = 0;
  };
  std::map<std::string, Tensor> tensors;  // by name
  std::vector<Part> parts;                // by name, then by box
  std::vector<size_t> files;              // how many each rank writes
  // Each set of ranks that have the same part, ascending. Their values must be
  // equal.
  std::vector<std::vector<size_t>> holders;
};

// Makes the plan from the claims_of() all ranks, in rank order. A part that
// several ranks have is written by the one of them that has the fewest bytes to
// write. A tensor of 1 MiB or more that is a large part of the snapshot is cut
// into as many parts as ranks have it. Ranks with a duplicate of it write none
// of it, unless all have one. The same claims give the same plan.
//
// Throws std::invalid_argument if ranks disagree on the dtype or shape of a
// tensor, or if their parts do not hold each element of a tensor once.
SavePlan plan_save(const std::vector<nlohmann::json>& claims);

// A part that this rank writes.
struct PlannedEntry {
  std::string name;
  Box box;
  at::Tensor elements;  // of the sizes of the box; shares the shard's memory
};

// Returns what `rank` writes, by file. `shards`: those from which its claims
// were made.
std::vector<std::vector<PlannedEntry>> entries_of(
    const SavePlan& plan, size_t rank, const std::vector<TensorShard>& shards);

// Returns what `rank` has, too, but another rank writes, in the order of
// plan.parts.
std::vector<PlannedEntry> replicas_of(const SavePlan& plan, size_t rank,
                                      const std::vector<TensorShard>& shards);

// Below this size a tensor is not cut.
inline constexpr int64_t kSmallestCut = int64_t{1} << 20;

}  // namespace lockstep::internal
