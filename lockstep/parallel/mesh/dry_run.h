#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/parallel/mesh/mesh_layout.h"

// The needs of a training on a mesh, computed and not run: memory and
// communication of a rank. To run the program itself as one rank of a world
// that does not exist, see the backend "fake" (docs/mesh.md).
namespace lockstep {

// The model and how it is trained.
struct DryRunModel {
  // ---- Parameters and their states ----

  // Elements of the whole model. At least 1.
  int64_t parameters{0};

  // Bytes per parameter: of the parameter, of its gradient, and of all that the
  // optimizer keeps. The initialisers are those of float32 and the two moments
  // of Adam. In mixed precision with Adam they are 2, 2 and 12 (copy, two
  // moments).
  int64_t parameter_bytes{4};
  int64_t gradient_bytes{4};
  int64_t optimizer_bytes{8};

  // The parts that the axis "shard" divides: 0 nothing, 1 the optimizer's
  // state, 2 also the gradients, 3 also the parameters.
  int zero_stage{3};

  // In how many calls parameters are gathered and gradients reduced: the units
  // of FullyShard, or the buckets of DistributedDataParallel.
  int64_t units{1};

  // ---- A transformer's activations ----

  // Layers, width, tokens of a sequence, sequences of a micro-batch of one
  // rank, micro-batches of a step, bytes of an element. Without layers the
  // communication along "tensor", "pipeline" and "context" is left out.
  int64_t layers{0};
  int64_t hidden{0};
  int64_t sequence{0};
  int64_t micro_batch{1};
  int64_t micro_batches{1};
  int64_t activation_bytes{4};

  // Whether what lies between the layers of the axis "tensor" is divided by
  // tokens (sequence_parallel of nn::ColumnParallelLinear and the others).
  bool sequence_parallel{false};
};

// The kinds of memory of one rank, in bytes.
struct DryRunMemory {
  int64_t parameters{0};
  int64_t gradients{0};
  int64_t optimizer{0};
  int64_t total() const { return parameters + gradients + optimizer; }
};

// The communication of a rank along an axis in one step (forward, backward and
// optimizer step of all micro-batches).
struct DryRunTraffic {
  std::string axis;  // several that act as one are joined: "data x context"
  int ranks;         // of its group
  // As the flight recorder names it: "all_reduce", "reduce_scatter_tensor", ...
  std::string operation;
  std::string what;  // "gradients", ...
  int64_t calls;
  // Bytes of all calls: of the tensor that the ranks have in common (the larger
  // one of what goes into the call and what comes out). The flight recorder
  // counts the same if no tensor must be padded.
  int64_t bytes;
  // Bytes that leave the rank if a ring of the ranks is used, which is the
  // least that any algorithm can do.
  int64_t sent;
};

struct DryRun {
  MeshLayout layout;
  DryRunModel model;
  DryRunMemory memory;
  std::vector<DryRunTraffic> traffic;

  // Returns a table of several lines: axes and groups, memory, traffic.
  std::string to_string() const;
};

// Computes what a rank of the mesh needs. Nothing is communicated. Throws
// std::invalid_argument if a number of `model` makes no sense.
//
// Axes: "tensor" and "pipeline" divide the parameters evenly, "shard" divides
// what the stage says; along all other axes, "context" too, ranks have equal
// parameters and add their gradients. What does not divide evenly is rounded
// up. With P the parameters of a rank before sharding, n the size of "shard":
//
//   memory    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
//             Trillion Parameter Models", section 5: stage 1 keeps 1/n of the
//             optimizer's state, stage 2 also of the gradients, stage 3 also of
//             the parameters. Activations, temporarily gathered parameters and
//             buckets come on top.
//   shard     the same paper, section 7. Stage 1 (ZeroRedundancyOptimizer):
//             gradients are reduced to all ranks, and the stepped parameters
//             gathered, P each. (The paper reduces and scatters the gradients,
//             which is half of that; so does this library on one host.) Stage 2
//             (FullyShard that does not reshard after forward): parameters are
//             gathered for forward, gradients reduced and scattered, P each.
//             Stage 3: parameters are gathered again for backward.
//   others    one all_reduce of the gradients of a rank: of P, or of the shard
//             if "shard" divides the optimizer's state. With stage 0 "shard" is
//             one of these axes.
//   tensor    Shoeybi et al., "Megatron-LM", section 3: two all_reduces of the
//             activations in forward and two in backward for each layer and
//             micro-batch. With sequence_parallel each of them is a gather and
//             a reduction to parts (Korthikanti et al., "Reducing Activation
//             Recomputation in Large Transformer Models", section 4.2.2), and
//             the gradients of two norms and two biases are added up.
//   pipeline  a stage in the middle sends the activations of each micro-batch
//             to the next stage and their gradients to the one before. (With
//             two stages each sends one of these.)
//   context   Liu et al., "Ring Attention with Blockwise Transformers": for
//             each layer and micro-batch keys and values go around in forward
//             (n - 1 sends) and again in backward, where their gradients go
//             with them and then home (n sends). Without a causal mask.
//
// This is what is communicated between hosts. Ranks of one host that share
// memory reduce the same bytes (the flight recorder's reduce_buckets), and
// gather nothing if they have one copy of the parameters. Not counted are the
// few numbers by which the ranks of a pipeline step, or of a ring attention,
// agree.
DryRun dry_run(const MeshLayout& layout, const DryRunModel& model);

}  // namespace lockstep
