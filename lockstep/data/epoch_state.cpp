#include "lockstep/data/epoch_state.h"

#include <stdexcept>

#include "lockstep/state/state_entry.h"

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

}  // namespace lockstep::internal
