#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/data/resumable_sampler.h"
#include "lockstep/data/sampler.h"

namespace lockstep::internal {

// Draws indices with given probabilities: what both weighted samplers share.
class WeightedDraw {
 public:
  // Keeps a copy of `weights`, as float64 on the CPU. Throws
  // std::invalid_argument, with the name of the sampler, unless they are one
  // dimension of finite numbers >= 0 with one above 0; if there are more than
  // 2^24 (torch.multinomial takes no more); if `num_samples` is not 1 or more;
  // or if there is no replacement and fewer weights are above 0 than samples
  // are drawn.
  WeightedDraw(const char* sampler, const at::Tensor& weights,
               int64_t num_samples, bool replacement);

  int64_t dataset_size() const { return weights_.size(0); }
  int64_t num_samples() const { return num_samples_; }

  // Returns the indices that Python's torch.multinomial draws with a generator
  // seeded so.
  at::Tensor order(uint64_t generator_seed) const;

  std::vector<EpochState::Fixed> entries() const;

 private:
  at::Tensor weights_;
  int64_t num_samples_;
  bool replacement_;
  int64_t digest_;
};

// Returns float64 weights on the CPU.
at::Tensor weights_tensor(const std::vector<double>& weights);

}  // namespace lockstep::internal

namespace lockstep {

// Visits every sample in the dataset's own order, in this process alone:
// torch's SequentialSampler. Ranks that share a dataset take DistributedSampler
// with
// {.shuffle = false}.
//
// position(), state_dict() and load_state_dict() are those of ResumableSampler,
// with the entries epoch, seed (0), position and dataset_size. Without
// set_epoch() each pass counts as the next epoch.
class SequentialSampler : public internal::ResumableSampler {
 public:
  // Throws std::invalid_argument for a negative size.
  explicit SequentialSampler(int64_t dataset_size);

  // The same for all samples of a dataset (lockstep/data/dataset.h).
  template <internal::KnowsSize D>
  explicit SequentialSampler(const D& dataset)
      : SequentialSampler(internal::size_of(dataset)) {}

 protected:
  at::Tensor order(uint64_t) const override { return {}; }
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
class RandomSampler : public internal::ResumableSampler {
 public:
  // Throws std::invalid_argument if the number of samples is not 1 or more, or
  // if there is nothing to draw from.
  explicit RandomSampler(int64_t dataset_size,
                         const RandomSamplerOptions& options = {});

  // The same for all samples of a dataset (lockstep/data/dataset.h).
  template <internal::KnowsSize D>
  explicit RandomSampler(const D& dataset,
                         const RandomSamplerOptions& options = {})
      : RandomSampler(internal::size_of(dataset), options) {}

  explicit RandomSampler(  // no such option
      internal::AnySize, ...) = delete;

 protected:
  at::Tensor order(uint64_t generator_seed) const override;
  std::vector<internal::EpochState::Fixed> order_entries() const override;

 private:
  int64_t num_samples_;
  bool replacement_;
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
class SubsetRandomSampler : public internal::ResumableSampler {
 public:
  // There may be no indices; then there are no samples to visit.
  explicit SubsetRandomSampler(std::vector<size_t> indices,
                               const SubsetRandomSamplerOptions& options = {});

  bool takes_larger_dataset() const override { return true; }

 protected:
  at::Tensor order(uint64_t generator_seed) const override;
  std::vector<internal::EpochState::Fixed> order_entries() const override;

 private:
  std::vector<size_t> indices_;
  int64_t digest_;
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
class WeightedRandomSampler : public internal::ResumableSampler {
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

 protected:
  at::Tensor order(uint64_t generator_seed) const override {
    return draw_.order(generator_seed);
  }
  std::vector<internal::EpochState::Fixed> order_entries() const override {
    return draw_.entries();
  }

 private:
  WeightedRandomSampler(internal::WeightedDraw draw, int64_t seed);

  internal::WeightedDraw draw_;
};

}  // namespace lockstep
