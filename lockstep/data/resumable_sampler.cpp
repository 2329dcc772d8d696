#include "lockstep/data/resumable_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "lockstep/base/environment.h"
#include "lockstep/comm/init.h"
#include "lockstep/state/state_tree.h"
#include "lockstep/worker/rank_environment.h"

namespace lockstep::internal {

void EpochState::set_epoch(int64_t epoch) {
  begun_ = false;
  if (epoch == epoch_) return;
  epoch_ = epoch;
  position_ = 0;
  resume_ = false;
}

int64_t EpochState::begin_pass() {
  if (!resume_) position_ = 0;
  resume_ = false;
  begun_ = true;
  return position_;
}

void EpochState::advance_if_begun() {
  if (begun_) set_epoch(epoch_ + 1);
}

std::map<std::string, int64_t> EpochState::state_dict(
    const std::vector<Fixed>& fixed) const {
  std::map<std::string, int64_t> state{
      {"epoch", epoch_}, {"seed", seed_}, {"position", position_}};
  for (const Fixed& entry : fixed) state.emplace(entry.name, entry.value);
  return state;
}

int64_t EpochState::entry(const std::map<std::string, int64_t>& state,
                          const std::string& name) const {
  return state_entry(state, name, sampler_);
}

void EpochState::require_same(const Fixed& fixed, int64_t saved) const {
  if (saved == fixed.value) return;
  std::string what;
  if (fixed.name == "dataset_size") {
    what = "for a dataset of " + std::to_string(saved) +
           " samples, but this dataset has " + std::to_string(fixed.value) +
           "; resume with the same dataset";
  } else if (fixed.kind == Fixed::Kind::digest) {
    what = "with other " + fixed.name +
           " than this sampler has; make the sampler with the same ones";
  } else {
    auto text = [&](int64_t value) {
      return fixed.kind == Fixed::Kind::flag ? (value ? "true" : "false")
                                             : std::to_string(value);
    };
    what = "with " + fixed.name + " = " + text(saved) +
           ", but this sampler has " + text(fixed.value) +
           "; make the sampler with the same option";
  }
  throw std::invalid_argument(sampler_ + ": the state was saved " + what +
                              ", or start the epoch anew");
}

void EpochState::load_state_dict(const std::map<std::string, int64_t>& state,
                                 const std::vector<Fixed>& fixed,
                                 int64_t highest) {
  if (state.empty()) return;
  const int64_t epoch = entry(state, "epoch");
  const int64_t seed = entry(state, "seed");
  const int64_t position = entry(state, "position");
  for (const Fixed& one : fixed) require_same(one, entry(state, one.name));
  if (position < 0 || position > highest) {
    throw std::invalid_argument(
        sampler_ + ": the state's position is " + std::to_string(position) +
        ", outside its epoch; the state is damaged, start the epoch anew");
  }
  epoch_ = epoch;
  seed_ = seed;
  position_ = position;
  resume_ = true;
  begun_ = false;
}

namespace {

// A rank that forgot init_process_group() would train on the whole dataset as
// if it were alone, and nothing would look wrong.
void require_started_alone(const std::string& sampler) {
  auto world_size =
      get_rank_env_int("WORLD_SIZE", 1, std::numeric_limits<int32_t>::max());
  if (world_size.value_or(1) > 1) {
    throw std::invalid_argument(
        sampler + ": WORLD_SIZE is " + std::to_string(*world_size) +
        " but there is no default process group; call init_process_group() "
        "first, or give num_replicas and rank");
  }
}

}  // namespace

Share share_of_rank(const char* sampler, std::optional<int64_t> num_replicas,
                    std::optional<int64_t> rank, bool drop_last, bool pad) {
  const bool grouped = is_initialized();
  if (!grouped && !(num_replicas && rank)) require_started_alone(sampler);
  Share share{.drop_last = drop_last, .pad = pad};
  if (grouped) share.num_replicas = get_world_size();
  if (grouped) share.rank = get_rank();
  share.num_replicas = num_replicas.value_or(share.num_replicas);
  share.rank = rank.value_or(share.rank);
  if (share.num_replicas < 1) {
    throw std::invalid_argument(std::string(sampler) + ": num_replicas is " +
                                std::to_string(share.num_replicas) +
                                "; it must be 1 or more");
  }
  if (share.rank < 0 || share.rank >= share.num_replicas) {
    throw std::invalid_argument(
        std::string(sampler) + ": rank is " + std::to_string(share.rank) +
        "; with num_replicas " + std::to_string(share.num_replicas) +
        " it must be in [0, " + std::to_string(share.num_replicas - 1) + "]");
  }
  return share;
}

int64_t checked_size(const char* sampler, int64_t dataset_size) {
  if (dataset_size >= 0) return dataset_size;
  throw std::invalid_argument(std::string(sampler) + ": dataset size is " +
                              std::to_string(dataset_size) +
                              "; it must be 0 or more");
}

int64_t checked_samples(const char* sampler, int64_t num_samples) {
  if (num_samples >= 1) return num_samples;
  throw std::invalid_argument(std::string(sampler) + ": num_samples is " +
                              std::to_string(num_samples) +
                              "; it must be 1 or more");
}

ResumableSampler::ResumableSampler(const char* name, int64_t length,
                                   int64_t dataset_size, int64_t seed,
                                   Share share, NextPass next_pass)
    : length_(length),
      dataset_size_(dataset_size),
      share_(share),
      next_pass_(next_pass),
      state_(name, seed) {}

std::vector<size_t> ResumableSampler::indices() const {
  return indices_from(0);
}

std::vector<size_t> ResumableSampler::begin_pass() {
  if (next_pass_ == NextPass::next_epoch) state_.advance_if_begun();
  pass_begin_ = state_.begin_pass();
  pass_end_ = end_from(pass_begin_);
  if (pass_end_ == pass_begin_) rest_left_out();
  return indices_from(pass_begin_);
}

void ResumableSampler::consumed(int64_t count) {
  // The last batch may be smaller than the batch size that the loader reports,
  // so the position stops at the end of the pass. (The number of places that
  // the batch would have may not fit an int64.)
  const int64_t left = pass_end_ - state_.position();
  if (left > 0 && count <= (left - 1) / share_.num_replicas) {
    state_.move_to(state_.position() + count * share_.num_replicas);
  } else {
    rest_left_out();
  }
}

void ResumableSampler::rest_left_out() {
  state_.move_to(std::max(pass_end_, length_));
}

PassPlaces ResumableSampler::places() const {
  return {.epoch = state_.epoch(),
          .first = pass_begin_ + share_.rank,
          .stride = share_.num_replicas};
}

int64_t ResumableSampler::size() const {
  const int64_t end = end_from(0);
  return end > share_.rank ? (end - share_.rank - 1) / share_.num_replicas + 1
                           : 0;
}

// Returns the place at which the order ends, padding included, if all ranks
// share it from `start` on.
int64_t ResumableSampler::end_from(int64_t start) const {
  int64_t rest = std::max<int64_t>(length_ - start, 0);
  if (share_.drop_last) {
    rest -= rest % share_.num_replicas;
  } else if (share_.pad) {
    rest += (share_.num_replicas - rest % share_.num_replicas) %
            share_.num_replicas;
  }
  return start + rest;
}

std::vector<size_t> ResumableSampler::indices_from(int64_t start) const {
  const int64_t end = end_from(start);
  std::vector<size_t> mine;
  if (end <= start + share_.rank) return mine;
  mine.reserve((end - start - share_.rank - 1) / share_.num_replicas + 1);
  const at::Tensor drawn = order(state_.generator_seed());
  const int64_t* values =
      drawn.defined() ? drawn.const_data_ptr<int64_t>() : nullptr;
  for (int64_t place = start + share_.rank; place < end;
       place += share_.num_replicas) {
    const int64_t index = place % length_;  // past the end: padding
    mine.push_back(static_cast<size_t>(values ? values[index] : index));
  }
  return mine;
}

std::vector<EpochState::Fixed> ResumableSampler::fixed_entries() const {
  std::vector<EpochState::Fixed> entries{
      {.name = "dataset_size", .value = dataset_size_}};
  for (EpochState::Fixed& entry : order_entries()) {
    entries.push_back(std::move(entry));
  }
  return entries;
}

void ResumableSampler::load_state_dict(
    const std::map<std::string, int64_t>& state) {
  // Padding adds less than one sample per rank, and the number of ranks fits an
  // int32.
  state_.load_state_dict(state, fixed_entries(),
                         length_ + std::numeric_limits<int32_t>::max());
}

at::Tensor random_order(int64_t size, uint64_t generator_seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(generator_seed);
  // Dtype and device are named: a program may have changed the defaults.
  return at::randperm(size, generator,
                      at::TensorOptions(at::kLong).device(at::kCPU));
}

}  // namespace lockstep::internal
