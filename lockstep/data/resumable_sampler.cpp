#include "lockstep/data/resumable_sampler.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace lockstep {

ResumableSampler::ResumableSampler(const char* name, int64_t seed,
                                   internal::EpochOrder order)
    : share_(order.share), state_(name, seed) {
  order.entries.insert(order.entries.begin(),
                       {.name = "dataset_size", .value = order.dataset_size});
  order_ = std::make_shared<const internal::EpochOrder>(std::move(order));
}

std::vector<size_t> ResumableSampler::indices() const {
  return indices_from(0);
}

std::vector<size_t> ResumableSampler::begin_pass() {
  share_.follow_world();
  if (order_->next_pass == internal::EpochOrder::NextPass::next_epoch)
    state_.advance_if_begun();
  pass_begin_ = state_.begin_pass();
  pass_end_ = end_from(pass_begin_);
  if (pass_end_ == pass_begin_) rest_left_out();
  return indices_from(pass_begin_);
}

void ResumableSampler::consumed(int64_t count) {
  const internal::Share& share = share_;
  // The last batch may be smaller than the batch size that the loader reports,
  // so the position stops at the end of the pass. (The number of places that
  // the batch would have may not fit an int64.)
  const int64_t left = pass_end_ - state_.position();
  if (left > 0 && count <= (left - 1) / share.num_replicas) {
    state_.move_to(state_.position() + count * share.num_replicas);
  } else {
    rest_left_out();
  }
}

void ResumableSampler::rest_left_out() {
  state_.move_to(std::max(pass_end_, order_->length));
}

PassPlaces ResumableSampler::places() const {
  const internal::Share& share = share_;
  return {.epoch = state_.epoch(),
          .first = pass_begin_ + share.rank,
          .stride = share.num_replicas};
}

int64_t ResumableSampler::size() const {
  const internal::Share& share = share_;
  const int64_t end = end_from(0);
  return end > share.rank ? (end - share.rank - 1) / share.num_replicas + 1 : 0;
}

// Returns the place at which the order ends, padding included, if all ranks
// share it from `start` on.
int64_t ResumableSampler::end_from(int64_t start) const {
  const internal::Share& share = share_;
  int64_t rest = std::max<int64_t>(order_->length - start, 0);
  if (share.drop_last) {
    rest -= rest % share.num_replicas;
  } else if (share.pad) {
    rest +=
        (share.num_replicas - rest % share.num_replicas) % share.num_replicas;
  }
  return start + rest;
}

std::vector<size_t> ResumableSampler::indices_from(int64_t start) const {
  const internal::Share& share = share_;
  const int64_t end = end_from(start);
  std::vector<size_t> mine;
  if (end <= start + share.rank) return mine;
  mine.reserve((end - start - share.rank - 1) / share.num_replicas + 1);
  const at::Tensor drawn =
      order_->draw ? order_->draw(state_.generator_seed()) : at::Tensor();
  const int64_t* values =
      drawn.defined() ? drawn.const_data_ptr<int64_t>() : nullptr;
  for (int64_t place = start + share.rank; place < end;
       place += share.num_replicas) {
    const int64_t index = place % order_->length;  // past the end: padding
    mine.push_back(static_cast<size_t>(values ? values[index] : index));
  }
  return mine;
}

std::map<std::string, int64_t> ResumableSampler::state_dict() const {
  return state_.state_dict(order_->entries);
}

void ResumableSampler::load_state_dict(
    const std::map<std::string, int64_t>& state) {
  // Padding adds less than one sample per rank, and the number of ranks fits an
  // int32.
  state_.load_state_dict(state, order_->entries,
                         order_->length + std::numeric_limits<int32_t>::max());
}

}  // namespace lockstep
