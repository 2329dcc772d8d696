#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/data/resumable_sampler.h"

namespace lockstep {

// The arguments of torch.utils.data.distributed.DistributedSampler (PyTorch
// documentation), with the same defaults, and pad.
struct DistributedSamplerOptions {
  // ---- Behaviour ----

  // The number of parts that the dataset is split into, and the part of this
  // process. Most programs leave both. None means world size and rank of the
  // default process group; 1 and 0 in a process that was started alone and has
  // no group. If the group goes on with fewer ranks (lockstep run
  // --heal=shrink), the next pass follows it, also if the same numbers were
  // given.
  std::optional<int64_t> num_replicas{};
  std::optional<int64_t> rank{};

  // Whether every epoch has a new order; otherwise samples keep the dataset's
  // own order. Set it to false for evaluation.
  bool shuffle{true};

  // Epoch e is shuffled by generator seed `seed + e`. Must be the same on all
  // ranks.
  int64_t seed{0};

  // If num_replicas does not divide the number of samples: leave out the end of
  // the order (true), or repeat samples from its start (false). Either way
  // every rank visits the same number of samples.
  bool drop_last{false};

  // ---- Beyond Python ----

  // If false, and drop_last is false too, samples are neither repeated nor left
  // out, so that over all ranks each sample is visited exactly once. With
  // drop_last this option has no effect. Set it to false for evaluation. Ranks
  // then differ by up to one sample, and may differ by one batch: do not call a
  // collective inside the loop (the backward of DistributedDataParallel calls
  // some), but reduce sums and counts after it.
  bool pad{true};
};

// Gives each rank its own part of a dataset. It follows
// torch.utils.data.distributed.DistributedSampler and gives the *same indices*
// as Python for the same arguments: the order comes from LibTorch's CPU
// generator, and rank r takes places r, r + num_replicas, ... of it.
//
//   DistributedSampler sampler(dataset, {.seed = 0});
//   DataLoader loader(dataset, sampler, {.batch_size = 32});
//   for (int64_t epoch = 0; epoch < epochs; ++epoch) {
//     sampler.set_epoch(epoch);
//     for (auto& batch : loader) { ... }
//   }
//
// Call set_epoch() before every epoch; without it every pass has the order of
// epoch 0. position() and state_dict(), for resuming in the middle of an epoch
// with any number of ranks, are those of ResumableSampler. The state has the
// entries epoch, seed, position, shuffle (0 or 1) and dataset_size.
class DistributedSampler : public ResumableSampler {
 public:
  // Throws std::invalid_argument for a negative size, num_replicas < 1, and a
  // rank outside [0, num_replicas). Also throws it if a default is wanted in a
  // process that was launched as one of several (WORLD_SIZE > 1) but has no
  // group yet.
  explicit DistributedSampler(DatasetSize dataset_size,
                              const DistributedSamplerOptions& options = {});
  template <class = void>
  explicit DistributedSampler(DatasetSize, ...) = delete;  // no such option
};

struct DistributedWeightedSamplerOptions {
  // As in DistributedSamplerOptions.
  std::optional<int64_t> num_replicas{};
  std::optional<int64_t> rank{};

  // Whether a sample can be drawn several times in an epoch.
  bool replacement{true};

  // Epoch e is drawn by generator seed `seed + e`. Must be the same on all
  // ranks.
  int64_t seed{0};

  // As in DistributedSamplerOptions, about the `num_samples` that are drawn.
  bool drop_last{false};
  bool pad{true};
};

// Gives each rank its own part of samples that are drawn with the given
// probabilities. All ranks draw the same `num_samples` indices, those of
// WeightedRandomSampler, and rank r takes places r, r + num_replicas, ... of
// them.
//
//   // Two classes, one of them rare: both are drawn equally often.
//   auto counts = torch::bincount(labels).to(torch::kDouble);
//   DistributedWeightedSampler sampler(counts.reciprocal().index({labels}),
//                                      labels.size(0));
//
// Call set_epoch() before every epoch; without it every pass draws what epoch 0
// draws. position(), state_dict() and load_state_dict() are those of
// ResumableSampler; the state has the entries of WeightedRandomSampler's.
class DistributedWeightedSampler : public ResumableSampler {
 public:
  // `num_samples`: how many all ranks together draw in an epoch. Throws
  // std::invalid_argument as WeightedRandomSampler and DistributedSampler do.
  DistributedWeightedSampler(
      const at::Tensor& weights, int64_t num_samples,
      const DistributedWeightedSamplerOptions& options = {});
  DistributedWeightedSampler(
      const std::vector<double>& weights, int64_t num_samples,
      const DistributedWeightedSamplerOptions& options = {});
};

}  // namespace lockstep
