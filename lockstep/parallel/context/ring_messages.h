#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/point_to_point.h"
#include "lockstep/parallel/context/attention_call.h"
#include "lockstep/parallel/context/context_chunks.h"

// The messages of ring attention. In step s a rank has the block of the rank s
// before it. Every message belongs to a step and is started by both ends in
// that step, blocks before either computes and gradients after it, so that it
// travels while they compute; no rank waits for a message of a later step.
// Those that a rank starts at one time are one batch: NCCL runs the others of a
// group one after the other, and ranks that all sent first would wait for ever.
//
// These classes give up their messages when an exception destroys them. The
// messages have tags of their own, which the program must not use in this
// group: kMaxTag - 2 to kMaxTag.
namespace lockstep::internal {

// Makes tensors for the blocks of other ranks.
class BlockShape {
 public:
  // `block` is that of some rank; the tensors have the dtype `dtype`.
  BlockShape(const at::Tensor& block, at::ScalarType dtype)
      : sizes_(block.sizes().vec()), options_(block.options().dtype(dtype)) {}
  // Returns memory for a block of `tokens` tokens.
  at::Tensor empty(int64_t tokens) const;

 private:
  std::vector<int64_t> sizes_;
  at::TensorOptions options_;
};

// Messages under way. Threads: one at a time may call.
class PendingMessages {
 public:
  PendingMessages() = default;
  PendingMessages(const PendingMessages&) = delete;
  PendingMessages& operator=(const PendingMessages&) = delete;
  // Gives up the messages that were not waited for.
  ~PendingMessages();

  void add(WorkPtr message) { messages_.push_back(std::move(message)); }
  // Blocks until all have ended. Throws if one failed.
  void wait();

 private:
  std::vector<WorkPtr> messages_;
};

// Passes the blocks of keys and values on.
class KeyValueRing {
 public:
  // `own` is this rank's block: [2, batch, key heads, tokens, head_dim], keys
  // and values, contiguous.
  KeyValueRing(AttentionCall call, std::shared_ptr<const RingPlan> plan,
               at::Tensor own);

  // The rank whose block this step's is.
  int source() const { return source_; }
  // The keys and values of that rank; only if the plan has this rank use them.
  at::Tensor key() const { return block_.select(0, 0); }
  at::Tensor value() const { return block_.select(0, 1); }

  // Starts to send this step's block to the next rank, and to receive that of
  // the next step.
  void start_next();
  // Begins the next step, once its block has arrived and this step's was sent.
  void finish_next();

 private:
  AttentionCall call_;
  std::shared_ptr<const RingPlan> plan_;
  BlockShape shape_;
  int step_ = 0;
  int source_;
  at::Tensor block_;  // undefined if neither this rank nor a later one uses it
  at::Tensor next_block_;
  PendingMessages messages_;
};

// Passes the gradients of the blocks on, one step after the blocks: each rank
// adds its own to the sum that it receives, so a sum is always made in the
// order source, source + 1, ... The last rank that uses the block sends the sum
// back to its source.
class GradientRing {
 public:
  // `block` is this rank's block of keys and values, `dtype` that of the sums.
  GradientRing(AttentionCall call, std::shared_ptr<const RingPlan> plan,
               const at::Tensor& block, at::ScalarType dtype);

  // Returns the sum of this step's block, shaped as the block, for this rank to
  // add its gradients: zeros in the first step, which is that of its own block.
  // Blocks until it has arrived. Undefined if neither this rank nor a later one
  // uses the block.
  const at::Tensor& receive();
  // Begins the next step: starts to send the sum on, and to receive that of the
  // next step. Blocks until the sum of the step before was sent.
  void pass_on();
  // Returns the gradients of this rank's own block. After the last step. Blocks
  // until they have arrived, and all sums were sent.
  at::Tensor own();

 private:
  AttentionCall call_;
  std::shared_ptr<const RingPlan> plan_;
  BlockShape shape_;
  int step_ = 0;
  at::Tensor sum_;
  at::Tensor own_;
  PendingMessages home_;
  PendingMessages received_;
  PendingMessages sent_;
};

}  // namespace lockstep::internal
