#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/parallel/ddp/gradient_arena.h"
#include "lockstep/parallel/ddp/logging_data.h"

namespace lockstep::internal {

struct TrainedParameter {
  NamedParameter named;
  bool sparse{false};  // whether its gradient is
};

// Manages where the gradients of a wrapper's parameters live, how they come
// into their buckets, and how the averages come out.
//
// Each .grad has one owner. It is a view (an alias into its bucket) if `views`
// is set and no other wrapper averages the same parameter; peers read and write
// it while it is reduced. Otherwise .grad has memory of its own, the bucket
// gets a copy, and the average is copied back at the end of backward, so that
// several wrappers can do this in one backward, one after the other.
//
// A large gradient that would be a view may also stay where backward has
// computed it, in the arena: peers read and write it there while it is reduced,
// and its place in the bucket is not used ("moved").
//
// Sparse parameters have no place in a bucket. One thread at a time.
class GradientBuckets {
 public:
  struct Options {
    bool views{true};
    // The dtype of the buckets; if unset, that of the parameters. If set, .grad
    // is never a view.
    std::optional<at::ScalarType> reduce_dtype{};
    // Whether large gradients of the CPU may be moved.
    bool place_gradients{false};
  };

  GradientBuckets(const std::vector<TrainedParameter>& parameters,
                  ProcessGroupPtr group, Options options);

  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  std::vector<at::Tensor> tensors() const;
  const std::vector<GradientBucket>& buckets() const { return buckets_; }
  // As in GradientBucket. The functions below that read or write a place call
  // it themselves.
  void use_on_current_stream(size_t bucket) {
    buckets_[bucket].use_on_current_stream();
  }
  bool is_sparse(size_t parameter) const { return sparse_[parameter]; }
  // The dtype of the parameter's gradient as users see it.
  at::ScalarType dtype(size_t parameter) const { return dtypes_[parameter]; }
  bool has_place(size_t parameter) const {
    return places_[parameter].bucket != kNone;
  }
  size_t bucket_of(size_t parameter) const { return places_[parameter].bucket; }

  // Makes new buckets for these parameters, in this order. Gradients in the old
  // buckets move into the new ones. No reduction of the old buckets may be
  // running.
  void arrange(const std::vector<std::vector<size_t>>& members);

  // Another wrapper averages this parameter, too: its .grad is not a view from
  // now on.
  void share(size_t parameter);
  bool any_shared() const { return any_shared_; }
  bool is_shared(size_t parameter) const { return shared_[parameter]; }
  bool all_views() const {
    return options_.views && !options_.reduce_dtype && !any_shared_;
  }

  // Where gradients may be moved to; null means nowhere.
  const std::shared_ptr<GradientArena>& arena() const { return arena_; }
  bool moves() const { return moves_; }
  // Whether gradients are moved from now on: the reduction must be able to.
  void allow_moves(bool allowed) { moves_ = allowed && arena_ != nullptr; }
  // Returns where the movable ranges of the bucket lie, for
  // BucketReduction::publish().
  const std::vector<uint64_t>& moved_places(size_t bucket) const {
    return moved_places_[bucket];
  }
  // Called when no peer uses moved gradients any more: forgets which they were.
  void forget_moves();

  // Called before a backward: gives a .grad that lies in another parameter's
  // place (users may swap them) memory of its own.
  void part();

  // Brings this rank's gradient into its place, times `factor`; writes zeros if
  // there is none. `unused`: this backward produced no gradient; then .grad
  // keeps its value and is not a view until give(). `added`: what autograd has
  // just added to .grad, if that is known. Throws std::runtime_error for a
  // sparse gradient.
  void take(size_t parameter, double factor, bool unused,
            const at::Tensor& added);
  // Makes the average, which is now in its place, the parameter's .grad.
  void give(size_t parameter);
  // Drops the gradients in the buckets, so that anything may be written there.
  // What users hold of them keeps its values.
  void release();

  // Fills in the fields of DDPLoggingData about parameters and buckets.
  void describe(DDPLoggingData& data) const;

  // Drops all gradients in the buckets, because peers may still write there;
  // what users hold of them is undefined.
  void abandon();

  // If a rank has only the averages of its own elements (`owned`, for each
  // parameter in memory order), a backward that adds to the other elements
  // would add to undefined values. So remember_shards() records each gradient
  // as a backward left it; the tensor's version shows whether it has changed
  // since.
  void own(std::vector<Range> owned) { owned_ = std::move(owned); }
  bool is_sharded() const { return !owned_.empty(); }
  std::vector<ReducedBucket> reduced_buckets() const;
  void remember_shards();
  void forget_shards() { left_shards_.clear(); }
  // Returns the first parameter with such an unchanged gradient for which
  // `counts` returns true. `accumulated`: the backward that asks has added to
  // this one once.
  std::optional<size_t> left_shard(const std::function<bool(size_t)>& counts,
                                   std::optional<size_t> accumulated) const;

 private:
  static constexpr size_t kNone = ~size_t{0};
  struct Place {
    size_t bucket = kNone;
    size_t slot = 0;
    size_t movable = kNone;  // among the movable slots of the bucket
  };
  bool is_movable(size_t parameter) const;
  bool move(size_t parameter, const at::Tensor& added);
  uint64_t& moved_place(size_t parameter);
  bool is_moved(size_t parameter) const;
  struct LeftShard {
    // Weak, but no other tensor gets this address while it is remembered.
    c10::weak_intrusive_ptr<c10::TensorImpl> gradient;
    int64_t version;
  };

  GradientBucket::Slot& slot(size_t parameter);
  at::Tensor& grad(size_t parameter) const;
  bool is_view(size_t parameter) const {
    return options_.views && !options_.reduce_dtype && !shared_[parameter];
  }
  void remember_shard(size_t parameter);
  bool is_left_shard(size_t parameter, int changes) const;

  std::vector<NamedParameter> parameters_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<bool> sparse_;
  ProcessGroupPtr group_;
  Options options_;
  std::vector<bool> shared_;
  bool any_shared_ = false;
  std::vector<GradientBucket> buckets_;
  std::vector<Place> places_;
  std::shared_ptr<GradientArena> arena_;
  bool moves_ = false;
  // For each bucket, for each of its movable slots: the offset in the arena, or
  // kInBucket.
  std::vector<std::vector<uint64_t>> moved_places_;
  // Keeps moved gradients while peers may use them, by parameter.
  std::map<size_t, at::Tensor> moved_;
  std::vector<Range> owned_;  // by parameter; empty means all elements
  std::map<size_t, LeftShard> left_shards_;
};

}  // namespace lockstep::internal
