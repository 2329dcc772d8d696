#include "lockstep/data/distributed_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "lockstep/base/environment.h"
#include "lockstep/comm/init.h"

namespace lockstep {
namespace {

// A rank that forgot init_process_group() would train on the whole dataset as
// if it were alone, and nothing would look wrong.
void require_started_alone() {
  auto world_size = internal::get_env_int("WORLD_SIZE", 1,
                                          std::numeric_limits<int32_t>::max());
  if (world_size.value_or(1) > 1) {
    throw std::invalid_argument(
        "DistributedSampler: WORLD_SIZE is " + std::to_string(*world_size) +
        " but there is no default process group; call init_process_group() "
        "first, or give num_replicas and rank");
  }
}

at::Tensor permutation(int64_t size, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  // Dtype and device are named: a program may have changed the defaults.
  return at::randperm(size, generator,
                      at::TensorOptions(at::kLong).device(at::kCPU));
}

}  // namespace

DistributedSampler::DistributedSampler(int64_t dataset_size,
                                       const DistributedSamplerOptions& options)
    : dataset_size_(dataset_size),
      shuffle_(options.shuffle),
      seed_(options.seed),
      drop_last_(options.drop_last),
      pad_(options.pad) {
  if (dataset_size < 0) {
    throw std::invalid_argument("DistributedSampler: dataset size is " +
                                std::to_string(dataset_size) +
                                "; it must be 0 or more");
  }
  bool grouped = is_initialized();
  if (!grouped && !(options.num_replicas && options.rank)) {
    require_started_alone();
  }
  num_replicas_ = options.num_replicas
                      ? *options.num_replicas
                      : (grouped ? int64_t{get_world_size()} : 1);
  rank_ = options.rank ? *options.rank : (grouped ? int64_t{get_rank()} : 0);
  if (num_replicas_ < 1) {
    throw std::invalid_argument("DistributedSampler: num_replicas is " +
                                std::to_string(num_replicas_) +
                                "; it must be 1 or more");
  }
  if (rank_ < 0 || rank_ >= num_replicas_) {
    throw std::invalid_argument(
        "DistributedSampler: rank is " + std::to_string(rank_) +
        "; with num_replicas " + std::to_string(num_replicas_) +
        " it must be in [0, " + std::to_string(num_replicas_ - 1) + "]");
  }
  int64_t total = total_size(0);
  size_ = total > rank_ ? (total - rank_ - 1) / num_replicas_ + 1 : 0;
}

void DistributedSampler::set_epoch(int64_t epoch) {
  if (epoch == epoch_) return;
  epoch_ = epoch;
  position_ = 0;
  resume_ = false;
}

std::vector<size_t> DistributedSampler::indices() const {
  return indices_from(0);
}

std::vector<size_t> DistributedSampler::begin_pass() {
  if (!resume_) position_ = 0;
  resume_ = false;
  pass_end_ = std::max(position_, total_size(position_));
  return indices_from(position_);
}

void DistributedSampler::consumed(int64_t count) {
  // The last batch may be smaller than the batch size that the loader reports,
  // so the position stops at the end of the pass.
  position_ = std::min(position_ + count * num_replicas_, pass_end_);
}

// Returns the place at which the order ends, padding included, if num_replicas_
// ranks share it from `start` on.
int64_t DistributedSampler::total_size(int64_t start) const {
  int64_t rest = std::max<int64_t>(dataset_size_ - start, 0);
  if (drop_last_) {
    rest -= rest % num_replicas_;
  } else if (pad_) {
    rest += (num_replicas_ - rest % num_replicas_) % num_replicas_;
  }
  return start + rest;
}

std::vector<size_t> DistributedSampler::indices_from(int64_t start) const {
  at::Tensor shuffled;
  const int64_t* order = nullptr;
  if (shuffle_) {
    // Unsigned, so that it wraps instead of overflowing; Python, too, hands a
    // negative seed to the generator modulo 2^64.
    shuffled = permutation(dataset_size_, static_cast<uint64_t>(seed_) +
                                              static_cast<uint64_t>(epoch_));
    order = shuffled.const_data_ptr<int64_t>();
  }
  int64_t total = total_size(start);
  std::vector<size_t> mine;
  if (total > start + rank_) {
    mine.reserve((total - start - rank_ - 1) / num_replicas_ + 1);
  }
  for (int64_t place = start + rank_; place < total; place += num_replicas_) {
    int64_t index = place % dataset_size_;  // past the end: padding
    mine.push_back(static_cast<size_t>(order ? order[index] : index));
  }
  return mine;
}

std::map<std::string, int64_t> DistributedSampler::state_dict() const {
  return {{"epoch", epoch_},
          {"seed", seed_},
          {"position", position_},
          {"shuffle", shuffle_ ? 1 : 0},
          {"dataset_size", dataset_size_}};
}

void DistributedSampler::load_state_dict(
    const std::map<std::string, int64_t>& state) {
  if (state.empty()) return;
  auto entry = [&](const char* name) {
    auto found = state.find(name);
    if (found == state.end()) {
      throw std::invalid_argument(
          std::string("DistributedSampler: the state has no entry \"") + name +
          "\"; load what state_dict() returned");
    }
    return found->second;
  };
  int64_t epoch = entry("epoch");
  int64_t seed = entry("seed");
  int64_t position = entry("position");
  bool shuffle = entry("shuffle") != 0;
  int64_t dataset_size = entry("dataset_size");
  if (dataset_size != dataset_size_) {
    throw std::invalid_argument(
        "DistributedSampler: the state was saved for a dataset of " +
        std::to_string(dataset_size) + " samples, but this dataset has " +
        std::to_string(dataset_size_) +
        "; resume with the same dataset, or start the epoch anew");
  }
  if (shuffle != shuffle_) {
    throw std::invalid_argument(
        std::string("DistributedSampler: the state was saved with shuffle = ") +
        (shuffle ? "true" : "false") + ", but this sampler has " +
        (shuffle_ ? "true" : "false") +
        "; make the sampler with the same option");
  }
  // Padding adds less than one sample per rank, and the number of ranks fits an
  // int32.
  int64_t highest = dataset_size_ + std::numeric_limits<int32_t>::max();
  if (position < 0 || position > highest) {
    throw std::invalid_argument(
        "DistributedSampler: the state's position is " +
        std::to_string(position) + ", outside its dataset of " +
        std::to_string(dataset_size_) +
        " samples; the state is damaged, start the epoch anew");
  }
  epoch_ = epoch;
  seed_ = seed;
  position_ = position;
  resume_ = true;
}

}  // namespace lockstep
