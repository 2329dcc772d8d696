#include "lockstep/data/epoch_order.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "lockstep/base/environment.h"
#include "lockstep/comm/init.h"
#include "lockstep/state/digest.h"
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

void Share::follow_world() {
  if (!is_of_world || !is_initialized() || get_world_size() >= num_replicas) {
    return;
  }
  num_replicas = get_world_size();
  rank = get_rank();
}

Share share_of_rank(const char* sampler, std::optional<int64_t> num_replicas,
                    std::optional<int64_t> rank, bool drop_last, bool pad) {
  const bool grouped = is_initialized();
  if (!grouped && !(num_replicas && rank)) require_started_alone(sampler);
  Share share{.drop_last = drop_last, .pad = pad};
  if (grouped) share.num_replicas = get_world_size();
  if (grouped) share.rank = get_rank();
  share.is_of_world =
      grouped &&
      num_replicas.value_or(share.num_replicas) == share.num_replicas &&
      rank.value_or(share.rank) == share.rank;
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

at::Tensor random_order(int64_t size, uint64_t generator_seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(generator_seed);
  // Dtype and device are named: a program may have changed the defaults.
  return at::randperm(size, generator,
                      at::TensorOptions(at::kLong).device(at::kCPU));
}

namespace {

constexpr int64_t kMostWeights = 1 << 24;

void check_weights(const std::string& sampler, const at::Tensor& weights,
                   int64_t num_samples, bool replacement) {
  const int64_t size = weights.size(0);
  if (size > kMostWeights) {
    throw std::invalid_argument(sampler + ": there are " +
                                std::to_string(size) +
                                " weights; torch.multinomial takes " +
                                std::to_string(kMostWeights) + " at most");
  }
  const double* values = weights.const_data_ptr<double>();
  int64_t positive = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (!(values[i] >= 0) || !std::isfinite(values[i])) {
      throw std::invalid_argument(sampler + ": weight " + std::to_string(i) +
                                  " is " + std::to_string(values[i]) +
                                  "; weights must be finite and 0 or more");
    }
    if (values[i] > 0) ++positive;
  }
  if (positive == 0) {
    throw std::invalid_argument(
        sampler + ": none of the " + std::to_string(size) +
        " weights is above 0, so that there is nothing to draw");
  }
  if (!replacement && num_samples > positive) {
    throw std::invalid_argument(
        sampler + ": num_samples is " + std::to_string(num_samples) +
        ", but only " + std::to_string(positive) +
        " weights are above 0; draw fewer samples, or with replacement");
  }
}

}  // namespace

EpochOrder weighted_order(const char* sampler, const at::Tensor& weights,
                          int64_t num_samples, bool replacement) {
  checked_samples(sampler, num_samples);
  if (!weights.defined() || weights.dim() != 1) {
    throw std::invalid_argument(
        std::string(sampler) + ": the weights " +
        (weights.defined()
             ? "have " + std::to_string(weights.dim()) + " dimensions"
             : "are undefined") +
        "; give a tensor of one dimension, with one weight for each sample");
  }
  const at::Tensor kept =
      weights.detach()
          .to(at::TensorOptions(at::kDouble).device(at::kCPU),
              /*non_blocking=*/false, /*copy=*/true)
          .contiguous();
  check_weights(sampler, kept, num_samples, replacement);
  Digest digest;
  const double* values = kept.const_data_ptr<double>();
  for (int64_t i = 0; i < kept.size(0); ++i) {
    digest.add(std::bit_cast<uint64_t>(values[i]));
  }
  using Kind = EpochState::Fixed::Kind;
  return {.length = num_samples,
          .dataset_size = kept.size(0),
          .draw =
              [=](uint64_t seed) {
                auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
                return at::multinomial(kept, num_samples, replacement,
                                       generator);
              },
          .entries = {{.name = "num_samples", .value = num_samples},
                      {.name = "replacement",
                       .value = replacement ? 1 : 0,
                       .kind = Kind::flag},
                      {.name = "weights",
                       .value = static_cast<int64_t>(digest.value()),
                       .kind = Kind::digest}}};
}

at::Tensor weights_tensor(const std::vector<double>& weights) {
  return at::tensor(weights, at::TensorOptions(at::kDouble).device(at::kCPU));
}

}  // namespace lockstep::internal
