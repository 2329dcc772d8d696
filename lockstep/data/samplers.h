#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/data/resumable_sampler.h"
#include "lockstep/data/sampler.h"

namespace lockstep {

// Visits every sample in the dataset's own order, in this process alone:
// torch's SequentialSampler. Ranks that share a dataset take DistributedSampler
// with
// {.shuffle = false}.
//
// position(), state_dict() and load_state_dict() are those of ResumableSampler,
// with the entries epoch, seed (0), position and dataset_size. Without
// set_epoch() each pass counts as the next epoch.
class SequentialSampler : public ResumableSampler {
 public:
  // Throws std::invalid_argument for a negative size.
  explicit SequentialSampler(DatasetSize dataset_size);
};

// The arguments of torch.utils.data.RandomSampler, and a seed instead of its
// generator.
struct RandomSamplerOptions {
  // Whether each sample is drawn from the whole dataset, so that some come
  // twice and others not at all.
  bool replacement{false};

  // The number of samples in an epoch, 1 or more. Without replacement a number
  // above the dataset's size goes through several whole orders. None means the
  // dataset's size.
  std::optional<int64_t> num_samples{};

  // Epoch e is drawn by generator seed `seed + e`.
  int64_t seed{0};
};

// Visits samples in random order, in this process alone:
// torch.utils.data.RandomSampler. In epoch e it gives the same indices as
// Python's with `generator=torch.Generator().manual_seed(seed + e)`. Ranks that
// share a dataset take DistributedSampler.
//
// set_epoch() selects an epoch. Without it each pass is the next epoch, so that
// a program of one process needs no set_epoch(). position(), state_dict() and
// load_state_dict() are those of ResumableSampler; the state has the entries
// epoch, seed, position, dataset_size, num_samples and replacement (0 or 1).
class RandomSampler : public ResumableSampler {
 public:
  // Throws std::invalid_argument if the number of samples is not 1 or more, or
  // if there is nothing to draw from.
  explicit RandomSampler(DatasetSize dataset_size,
                         const RandomSamplerOptions& options = {});
  template <class = void>
  explicit RandomSampler(DatasetSize, ...) = delete;  // no such option
};

struct SubsetRandomSamplerOptions {
  // Epoch e is drawn by generator seed `seed + e`.
  int64_t seed{0};
};

// Visits the samples with the given indices in random order, in this process
// alone: torch.utils.data.SubsetRandomSampler. In epoch e it gives the same
// indices as Python's with `generator=torch.Generator().manual_seed(seed + e)`.
//
// set_epoch() selects an epoch. Without it each pass is the next epoch.
// position(), state_dict() and load_state_dict() are those of ResumableSampler;
// the state has the entries epoch, seed, position, dataset_size (the highest
// index + 1) and indices (a digest of them).
class SubsetRandomSampler : public ResumableSampler {
 public:
  // There may be no indices; then there are no samples to visit.
  explicit SubsetRandomSampler(std::vector<size_t> indices,
                               const SubsetRandomSamplerOptions& options = {});

  bool takes_larger_dataset() const override { return true; }
};

// The arguments of torch.utils.data.WeightedRandomSampler, and a seed instead
// of its generator.
struct WeightedRandomSamplerOptions {
  // Whether a sample can be drawn several times in an epoch.
  bool replacement{true};

  // Epoch e is drawn by generator seed `seed + e`.
  int64_t seed{0};
};

// Draws samples with the given probabilities, in this process alone:
// torch.utils.data.WeightedRandomSampler. In epoch e it gives the same indices
// as Python's with `generator=torch.Generator().manual_seed(seed + e)`. Ranks
// that share a dataset take DistributedWeightedSampler.
//
// set_epoch() selects an epoch. Without it each pass is the next epoch.
// position(), state_dict() and load_state_dict() are those of ResumableSampler;
// the state has the entries epoch, seed, position, dataset_size, num_samples,
// replacement (0 or 1) and weights (a digest of them).
class WeightedRandomSampler : public ResumableSampler {
 public:
  // `weights`: one for each sample of the dataset, of any type and on any
  // device; they are copied. They need not add up to 1. `num_samples` are drawn
  // in an epoch.
  //
  // Throws std::invalid_argument if a weight is negative or not finite, if none
  // is above 0, if there are more than 2^24, if `num_samples` is not 1 or more,
  // or if that many cannot be drawn without replacement.
  WeightedRandomSampler(const at::Tensor& weights, int64_t num_samples,
                        const WeightedRandomSamplerOptions& options = {});
  WeightedRandomSampler(const std::vector<double>& weights, int64_t num_samples,
                        const WeightedRandomSamplerOptions& options = {});
};

}  // namespace lockstep
