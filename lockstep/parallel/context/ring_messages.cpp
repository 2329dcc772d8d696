#include "lockstep/parallel/context/ring_messages.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "lockstep/comm/collective_work.h"

namespace lockstep::internal {
namespace {

constexpr int kRingBlockTag = kMaxTag;
constexpr int kRingSumTag = kMaxTag - 1;
constexpr int kRingHomeTag = kMaxTag - 2;

// The rank `distance` after this one.
int rank_after(const ProcessGroup& group, int distance) {
  const int ranks = group.size();
  return ((group.rank() + distance) % ranks + ranks) % ranks;
}

WorkPtr isend_in_ring(const AttentionCall& call, const at::Tensor& tensor,
                      int rank, int tag) {
  return isend(tensor, call.group->global_rank(rank),
               {.group = call.group, .tag = tag, .timeout = call.timeout});
}

WorkPtr irecv_in_ring(const AttentionCall& call, const at::Tensor& tensor,
                      int rank, int tag) {
  return irecv(tensor, call.group->global_rank(rank),
               {.group = call.group, .tag = tag, .timeout = call.timeout});
}

}  // namespace

at::Tensor BlockShape::empty(int64_t tokens) const {
  auto sizes = sizes_;
  sizes[3] = tokens;
  return at::empty(sizes, options_);
}

PendingMessages::~PendingMessages() {
  for (const auto& message : messages_) give_up(*message);
}

void PendingMessages::wait() {
  while (!messages_.empty()) {
    messages_.back()->wait();
    messages_.pop_back();
  }
}

KeyValueRing::KeyValueRing(AttentionCall call,
                           std::shared_ptr<const RingPlan> plan, at::Tensor own)
    : call_(std::move(call)),
      plan_(std::move(plan)),
      shape_(own, own.scalar_type()),
      source_(call_.group->rank()),
      block_(std::move(own)) {}

void KeyValueRing::start_next() {
  const auto& group = *call_.group;
  const int next_source = rank_after(group, -step_ - 1);
  next_block_ = at::Tensor();
  if (step_ < plan_->hops(next_source)) {
    next_block_ = shape_.empty(plan_->keys(next_source));
    messages_.add(irecv_in_ring(call_, next_block_, rank_after(group, -1),
                                kRingBlockTag));
  }
  if (step_ < plan_->hops(source_)) {
    messages_.add(
        isend_in_ring(call_, block_, rank_after(group, 1), kRingBlockTag));
  }
}

void KeyValueRing::finish_next() {
  messages_.wait();
  ++step_;
  source_ = rank_after(*call_.group, -step_);
  block_ = std::move(next_block_);
}

GradientRing::GradientRing(AttentionCall call,
                           std::shared_ptr<const RingPlan> plan,
                           const at::Tensor& block, at::ScalarType dtype)
    : call_(std::move(call)), plan_(std::move(plan)), shape_(block, dtype) {
  const int rank = call_.group->rank();
  const int hops = plan_->hops(rank);
  if (hops == 0) return;
  // Started here, because the last rank may be done with the block long before
  // this rank is done with those of others.
  own_ = shape_.empty(plan_->keys(rank));
  home_.add(
      irecv_in_ring(call_, own_, rank_after(*call_.group, hops), kRingHomeTag));
}

void GradientRing::start() {
  const auto& group = *call_.group;
  const int source = rank_after(group, -step_);
  sum_ = at::Tensor();
  if (step_ > plan_->hops(source)) return;
  sum_ = shape_.empty(plan_->keys(source));
  if (step_ == 0) {
    sum_.zero_();
  } else {
    received_.add(
        irecv_in_ring(call_, sum_, rank_after(group, -1), kRingSumTag));
  }
}

const at::Tensor& GradientRing::receive() {
  received_.wait();
  return sum_;
}

void GradientRing::pass_on() {
  const auto& group = *call_.group;
  const int source = rank_after(group, -step_);
  const int hops = plan_->hops(source);
  // No more than two sums are in memory, besides this rank's own.
  sent_.wait();
  if (step_ < hops) {
    sent_.add(isend_in_ring(call_, sum_, rank_after(group, 1), kRingSumTag));
  } else if (step_ == hops && hops > 0) {
    sent_.add(isend_in_ring(call_, sum_, source, kRingHomeTag));
  } else if (step_ == hops) {
    own_ = sum_;
  }
  ++step_;
}

at::Tensor GradientRing::own() {
  sent_.wait();
  home_.wait();
  return own_;
}

}  // namespace lockstep::internal
