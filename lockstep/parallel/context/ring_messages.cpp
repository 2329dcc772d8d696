#include "lockstep/parallel/context/ring_messages.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "lockstep/comm/collective_work.h"

namespace lockstep::internal {
namespace {

constexpr int kRingBlockTag = kMaxTag;
constexpr int kRingSumTag = kMaxTag - 1;
constexpr int kRingHomeTag = kMaxTag - 2;

using Kind = P2POp::Kind;

// The rank `distance` after this one.
int rank_after(const ProcessGroup& group, int distance) {
  const int ranks = group.size();
  return ((group.rank() + distance) % ranks + ranks) % ranks;
}

P2POp message(P2POp::Kind kind, const AttentionCall& call,
              const at::Tensor& tensor, int rank, int tag) {
  return {kind,       tensor, call.group->global_rank(rank),
          call.group, tag,    call.timeout};
}

// Messages that start together; each is waited for in its own list.
class MessageBatch {
 public:
  void add(P2POp message, PendingMessages& pending) {
    messages_.push_back(std::move(message));
    pending_.push_back(&pending);
  }
  void start() {
    if (messages_.empty()) return;
    auto works = batch_isend_irecv(messages_);
    for (size_t i = 0; i < works.size(); ++i) {
      pending_[i]->add(std::move(works[i]));
    }
  }

 private:
  std::vector<P2POp> messages_;
  std::vector<PendingMessages*> pending_;
};

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
  MessageBatch batch;
  if (step_ < plan_->hops(next_source)) {
    next_block_ = shape_.empty(plan_->keys(next_source));
    batch.add(message(Kind::irecv, call_, next_block_, rank_after(group, -1),
                      kRingBlockTag),
              messages_);
  }
  if (step_ < plan_->hops(source_)) {
    batch.add(message(Kind::isend, call_, block_, rank_after(group, 1),
                      kRingBlockTag),
              messages_);
  }
  batch.start();
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
    : call_(std::move(call)),
      plan_(std::move(plan)),
      shape_(block, dtype),
      sum_(shape_.empty(plan_->keys(call_.group->rank())).zero_()) {}

const at::Tensor& GradientRing::receive() {
  received_.wait();
  return sum_;
}

void GradientRing::pass_on() {
  const auto& group = *call_.group;
  const int rank = group.rank();
  const int source = rank_after(group, -step_);
  // No more than two sums are in memory, besides this rank's own.
  sent_.wait();
  MessageBatch batch;
  if (step_ < plan_->hops(source)) {
    batch.add(
        message(Kind::isend, call_, sum_, rank_after(group, 1), kRingSumTag),
        sent_);
  } else if (step_ == plan_->hops(source) && source != rank) {
    batch.add(message(Kind::isend, call_, sum_, source, kRingHomeTag), sent_);
  }
  // The last rank that uses this rank's block is done with it.
  if (step_ == plan_->hops(rank)) {
    own_ = step_ == 0 ? sum_ : shape_.empty(plan_->keys(rank));
    if (step_ > 0) {
      batch.add(message(Kind::irecv, call_, own_, rank_after(group, step_),
                        kRingHomeTag),
                home_);
    }
  }
  ++step_;
  const int next_source = rank_after(group, -step_);
  sum_ = at::Tensor();
  if (step_ <= plan_->hops(next_source)) {
    sum_ = shape_.empty(plan_->keys(next_source));
    batch.add(
        message(Kind::irecv, call_, sum_, rank_after(group, -1), kRingSumTag),
        received_);
  }
  batch.start();
}

at::Tensor GradientRing::own() {
  sent_.wait();
  home_.wait();
  return own_;
}

}  // namespace lockstep::internal
