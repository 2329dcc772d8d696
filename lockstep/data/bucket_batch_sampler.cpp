#include "lockstep/data/bucket_batch_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <stdexcept>

#include "lockstep/state/digest.h"

namespace lockstep {
namespace {

constexpr const char* kBucketSampler = "BucketBatchSampler";
constexpr int64_t kDefaultWindow = 100;

void check_buckets(const std::vector<int64_t>& lengths,
                   const BucketBatchSamplerOptions& options) {
  auto refuse = [](const std::string& what) {
    throw std::invalid_argument(std::string(kBucketSampler) + ": " + what);
  };
  if (options.batch_size < 1) {
    refuse("batch_size is " + std::to_string(options.batch_size) +
           "; it must be 1 or more");
  }
  if (options.window && *options.window < 1) {
    refuse("window is " + std::to_string(*options.window) +
           " steps; it must be 1 or more");
  }
  if (options.window && !options.boundaries.empty()) {
    refuse("both boundaries and a window are given; give one of them");
  }
  for (size_t i = 1; i < options.boundaries.size(); ++i) {
    if (options.boundaries[i] <= options.boundaries[i - 1]) {
      refuse("boundary " + std::to_string(options.boundaries[i]) + " follows " +
             std::to_string(options.boundaries[i - 1]) +
             "; boundaries must ascend");
    }
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0) {
      refuse("the length of sample " + std::to_string(i) + " is " +
             std::to_string(lengths[i]) + "; it must be 0 or more");
    }
  }
}

// Returns the bucket that a sample of this length is in.
size_t bucket_of(int64_t length, const std::vector<int64_t>& boundaries) {
  return std::ranges::upper_bound(boundaries, length) - boundaries.begin();
}

}  // namespace

BucketBatchSampler::BucketBatchSampler(std::vector<int64_t> lengths,
                                       const BucketBatchSamplerOptions& options)
    : lengths_(std::move(lengths)),
      options_(options),
      share_(internal::share_of_rank(kBucketSampler, options.num_replicas,
                                     options.rank, options.drop_last,
                                     options.pad)),
      state_(kBucketSampler, options.seed) {
  check_buckets(lengths_, options);
  // A larger step would visit no more samples, and its end would not fit.
  constexpr int64_t kLargestStep = std::numeric_limits<int64_t>::max() / 2;
  options_.batch_size =
      std::min(options_.batch_size, kLargestStep / share_.num_replicas);
  step_size_ = own_step_size();
  internal::Digest digest;
  for (const int64_t length : lengths_) {
    digest.add(static_cast<uint64_t>(length));
  }
  digest.add(uint64_t{options.boundaries.size()});
  for (const int64_t boundary : options.boundaries) {
    digest.add(static_cast<uint64_t>(boundary));
  }
  digest.add(static_cast<uint64_t>(options.window.value_or(kDefaultWindow)));
  digest_ = static_cast<int64_t>(digest.value());
}

void BucketBatchSampler::set_epoch(int64_t epoch) {
  if (epoch != state_.epoch()) step_size_ = own_step_size();
  state_.set_epoch(epoch);
}

// Returns the sizes of the groups, in the order of the buckets or windows.
std::vector<int64_t> BucketBatchSampler::group_sizes(int64_t step_size) const {
  std::vector<int64_t> together;  // samples that are cut into groups
  if (options_.boundaries.empty()) {
    // A window is a multiple of a step, so that only the last group of all can
    // be smaller.
    together.push_back(dataset_size());
  } else {
    together.resize(options_.boundaries.size() + 1);
    for (const int64_t length : lengths_) {
      ++together[bucket_of(length, options_.boundaries)];
    }
  }
  std::vector<int64_t> sizes;
  for (int64_t samples : together) {
    for (; samples > 0; samples -= step_size) {
      sizes.push_back(std::min(samples, step_size));
    }
  }
  return sizes;
}

// Returns the samples in the order of the groups. `shuffled`: their order
// before that, or null for 0, 1, 2, ...
std::vector<size_t> BucketBatchSampler::sorted_samples(
    const int64_t* shuffled, int64_t step_size) const {
  std::vector<size_t> samples(lengths_.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i] = shuffled ? static_cast<size_t>(shuffled[i]) : i;
  }
  if (!options_.boundaries.empty()) {
    std::vector<std::vector<size_t>> buckets(options_.boundaries.size() + 1);
    for (const size_t sample : samples) {
      buckets[bucket_of(lengths_[sample], options_.boundaries)].push_back(
          sample);
    }
    samples.clear();
    for (const auto& bucket : buckets) {
      samples.insert(samples.end(), bucket.begin(), bucket.end());
    }
    return samples;
  }
  // A window larger than the dataset is as good as one of its size.
  const int64_t steps = std::min(options_.window.value_or(kDefaultWindow),
                                 dataset_size() / step_size + 1);
  const int64_t window = steps * step_size;
  const auto iterator_at = [&](int64_t place) {
    return samples.begin() + std::min(place, dataset_size());
  };
  for (int64_t begin = 0; begin < dataset_size(); begin += window) {
    std::stable_sort(
        iterator_at(begin), iterator_at(begin + window),
        [&](size_t a, size_t b) { return lengths_[a] < lengths_[b]; });
  }
  return samples;
}

BucketBatchSampler::Order BucketBatchSampler::order() const {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(state_.generator_seed());
  const auto type = at::TensorOptions(at::kLong).device(at::kCPU);
  at::Tensor shuffled;
  if (options_.shuffle) {
    shuffled = at::randperm(dataset_size(), generator, type);
  }
  const std::vector<size_t> samples = sorted_samples(
      shuffled.defined() ? shuffled.const_data_ptr<int64_t>() : nullptr,
      step_size_);

  std::vector<Step> whole, smaller;
  int64_t begin = 0;
  for (const int64_t size : group_sizes(step_size_)) {
    (size == step_size_ ? whole : smaller).push_back({begin, begin + size});
    begin += size;
  }
  at::Tensor turns;
  if (options_.shuffle) {
    turns = at::randperm(static_cast<int64_t>(whole.size()), generator, type);
  }
  Order order;
  order.indices.reserve(samples.size());
  const auto append = [&](const Step& group) {
    order.indices.insert(order.indices.end(), samples.begin() + group.begin,
                         samples.begin() + group.end);
    order.ends.push_back(static_cast<int64_t>(order.indices.size()));
  };
  for (size_t i = 0; i < whole.size(); ++i) {
    append(whole[turns.defined() ? turns.const_data_ptr<int64_t>()[i] : i]);
  }
  if (options_.drop_last) return order;
  // The smallest last: a rank for which a step has no sample has none in those
  // after it either, so that the ranks' batches belong to the same steps up to
  // there.
  std::ranges::stable_sort(smaller, std::greater(), [](const Step& group) {
    return group.end - group.begin;
  });
  for (const Step& group : smaller) append(group);
  return order;
}

// Returns the steps of all ranks from the place `start` on.
std::vector<BucketBatchSampler::Step> BucketBatchSampler::steps(
    const Order& order, int64_t start) const {
  const int64_t size = own_step_size();
  std::vector<Step> steps;
  int64_t begin = start;
  for (const int64_t end : order.ends) {
    for (; begin < end; begin = steps.back().end) {
      steps.push_back({begin, std::min(begin + size, end)});
    }
  }
  if (batches_are_aligned(steps)) return steps;
  // The groups are those of another world. Steps that do not end with a group
  // are whole up to the last one.
  steps.clear();
  const auto last = static_cast<int64_t>(order.indices.size());
  for (begin = start; begin < last; begin += size) {
    if (options_.drop_last && last - begin < size) break;
    steps.push_back({begin, std::min(begin + size, last)});
  }
  return steps;
}

// Returns whether the ranks' batches are all whole, if they must be, and
// whether batch i of each rank that has so many belongs to the same step.
bool BucketBatchSampler::batches_are_aligned(
    const std::vector<Step>& steps) const {
  if (options_.drop_last) {
    return std::ranges::all_of(steps, [&](const Step& step) {
      return step.end - step.begin == own_step_size();
    });
  }
  // With padding every rank has a batch in every step. Otherwise ranks without
  // one may only be those that had none in the step before.
  return share_.pad ||
         std::ranges::is_sorted(steps, std::greater(), [&](const Step& step) {
           return std::min(step.end - step.begin, share_.num_replicas);
         });
}

// Returns how many of a step's samples this rank visits.
int64_t BucketBatchSampler::samples_of_rank(int64_t samples) const {
  const int64_t ranks = share_.num_replicas;
  return share_.pad ? (samples + ranks - 1) / ranks
                    : (samples + ranks - 1 - share_.rank) / ranks;
}

BatchList BucketBatchSampler::begin_pass() {
  share_.follow_world();
  // A pass that does not resume begins its epoch anew, with its own groups.
  if (!state_.resumes()) step_size_ = own_step_size();
  const int64_t start = state_.begin_pass();
  const Order order = this->order();
  BatchList list;
  list.epoch = state_.epoch();
  positions_.clear();
  delivered_ = 0;
  for (const Step& step : steps(order, start)) {
    const int64_t samples = step.end - step.begin;
    const int64_t mine = samples_of_rank(samples);
    if (mine == 0) continue;
    for (int64_t i = 0; i < mine; ++i) {
      const int64_t turn = share_.rank + i * share_.num_replicas;
      const int64_t place = step.begin + turn % samples;  // repeats: padding
      list.indices.push_back(order.indices[place]);
      // A repeated sample is seeded as one of a further round over the dataset.
      list.places.push_back(place + turn / samples * dataset_size());
    }
    list.ends.push_back(list.indices.size());
    positions_.push_back(step.end);
  }
  // Samples that drop_last leaves out count as consumed with the last batch.
  if (options_.drop_last) {
    if (positions_.empty()) {
      state_.move_to(dataset_size());
    } else {
      positions_.back() = dataset_size();
    }
  }
  return list;
}

void BucketBatchSampler::consumed_batch() {
  state_.move_to(positions_.at(delivered_++));
}

int64_t BucketBatchSampler::size() const {
  int64_t batches = 0;
  for (const int64_t size : group_sizes(own_step_size())) {
    if (options_.drop_last ? size == own_step_size()
                           : samples_of_rank(size) > 0) {
      ++batches;
    }
  }
  return batches;
}

std::vector<internal::EpochState::Fixed> BucketBatchSampler::fixed_entries()
    const {
  using Kind = internal::EpochState::Fixed::Kind;
  return {{.name = "dataset_size", .value = dataset_size()},
          {.name = "shuffle",
           .value = options_.shuffle ? 1 : 0,
           .kind = Kind::flag},
          {.name = "drop_last",
           .value = options_.drop_last ? 1 : 0,
           .kind = Kind::flag},
          {.name = "buckets", .value = digest_, .kind = Kind::digest}};
}

std::map<std::string, int64_t> BucketBatchSampler::state_dict() const {
  auto state = state_.state_dict(fixed_entries());
  state.emplace("step_size", step_size_);
  return state;
}

std::map<std::string, int64_t> BucketBatchSampler::next_pass_state() const {
  internal::EpochState next = state_;
  next.begin_pass();
  auto state = next.state_dict(fixed_entries());
  state.emplace("step_size", state_.resumes() ? step_size_ : own_step_size());
  return state;
}

void BucketBatchSampler::load_state_dict(
    const std::map<std::string, int64_t>& state) {
  if (state.empty()) return;
  const int64_t step_size = state_.entry(state, "step_size");
  if (step_size < 1) {
    throw std::invalid_argument(std::string(kBucketSampler) +
                                ": the state's step_size is " +
                                std::to_string(step_size) +
                                "; the state is damaged, start the epoch anew");
  }
  state_.load_state_dict(state, fixed_entries(), dataset_size());
  step_size_ = step_size;
}

}  // namespace lockstep
