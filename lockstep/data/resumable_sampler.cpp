#include "lockstep/data/resumable_sampler.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace lockstep {

ResumableSampler::ResumableSampler(const char* name, int64_t seed,
                                   internal::EpochOrder order,
                                   const internal::Share& share)
    : share_(share), state_(name, seed) {
  order.entries.insert(order.entries.begin(),
                       {.name = "dataset_size", .value = order.dataset_size});
  order_ = std::make_shared<const internal::EpochOrder>(std::move(order));
}

std::vector<size_t> ResumableSampler::indices() const {
  return indices_from(0);
}

std::vector<size_t> ResumableSampler::begin_pass() {
  share_.follow_world();
  pass_begin_ = begin(state_);
  pass_end_ = end_from(pass_begin_);
  if (pass_end_ == pass_begin_) rest_left_out();
  return indices_from(pass_begin_);
}

int64_t ResumableSampler::begin(internal::EpochState& state) const {
  if (order_->next_pass == internal::EpochOrder::NextPass::next_epoch) {
    state.advance_if_begun();
  }
  return state.begin_pass();
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
  state_.move_to(std::max(pass_end_, order_->length));
}

PassPlaces ResumableSampler::places() const {
  return {.epoch = state_.epoch(),
          .first = pass_begin_ + share_.rank,
          .stride = share_.num_replicas};
}

int64_t ResumableSampler::size() const {
  const int64_t end = end_from(0);
  if (end <= share_.rank) return 0;
  return (end - share_.rank - 1) / share_.num_replicas + 1;
}

// Returns the place at which the order ends, padding included, if all ranks
// share it from `start` on.
int64_t ResumableSampler::end_from(int64_t start) const {
  const int64_t ranks = share_.num_replicas;
  int64_t rest = std::max<int64_t>(order_->length - start, 0);
  if (share_.drop_last) {
    rest -= rest % ranks;
  } else if (share_.pad) {
    rest += (ranks - rest % ranks) % ranks;
  }
  return start + rest;
}

std::vector<size_t> ResumableSampler::indices_from(int64_t start) const {
  const int64_t end = end_from(start);
  std::vector<size_t> mine;
  if (end <= start + share_.rank) return mine;
  mine.reserve((end - start - share_.rank - 1) / share_.num_replicas + 1);
  const at::Tensor drawn =
      order_->draw ? order_->draw(state_.generator_seed()) : at::Tensor();
  const int64_t* values =
      drawn.defined() ? drawn.const_data_ptr<int64_t>() : nullptr;
  for (int64_t place = start + share_.rank; place < end;
       place += share_.num_replicas) {
    const int64_t index = place % order_->length;  // past the end: padding
    mine.push_back(static_cast<size_t>(values ? values[index] : index));
  }
  return mine;
}

std::map<std::string, int64_t> ResumableSampler::state_dict() const {
  return state_.state_dict(order_->entries);
}

std::map<std::string, int64_t> ResumableSampler::next_pass_state() const {
  internal::EpochState next = state_;
  begin(next);
  return next.state_dict(order_->entries);
}

void ResumableSampler::load_state_dict(
    const std::map<std::string, int64_t>& state) {
  // Padding adds less than one sample per rank, and the number of ranks fits an
  // int32.
  state_.load_state_dict(state, order_->entries,
                         order_->length + std::numeric_limits<int32_t>::max());
}

}  // namespace lockstep
