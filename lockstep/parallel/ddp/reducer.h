#pragma once

#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/span.h"
#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/parallel/ddp/comm_hook.h"
#include "lockstep/parallel/ddp/delayed_bucket.h"
#include "lockstep/parallel/ddp/gradient_check.h"
#include "lockstep/parallel/ddp/gradient_placement.h"
#include "lockstep/parallel/ddp/logging_data.h"

namespace lockstep {

// The options of DistributedDataParallel that the reducer serves; their
// meaning is said there.
struct ReducerOptions {
  BucketLimits limits;
  // Of the buckets before the order of readiness is known: none, all in one.
  BucketLimits first_limits{};
  bool find_unused_parameters{false};
  bool static_graph{false};
  bool gradient_as_bucket_view{true};
  bool skip_all_reduce_unused_params{false};
  bool batched_grad_copy{false};
  bool check_for_nan_in_grad{false};
  std::optional<at::ScalarType> reduce_dtype{};
};

struct TrainedParameter {
  NamedParameter named;
  bool sparse{false};  // its gradient is
};

// Averages gradients over the ranks of a group while backward computes them.
//
// A hook on each parameter marks its gradient ready. The gradient lies in a
// bucket: either autograd accumulated it there (.grad is an alias into the
// bucket), or, after zero_grad(set_to_none=true), it is a fresh tensor. A large
// one on the CPU was computed in the bucket (gradient_placement.h), others are
// copied there, and .grad becomes the alias again. The last ready parameter
// of a bucket publishes it (bucket_reduction.h); each hook goes on with what
// all ranks have published, and the end of backward waits for the rest.
// Buckets are published in their order on every rank, whatever the order of
// readiness.
//
// The first backward has one bucket for each dtype and device: in which order
// gradients become ready is not known yet. Behind the first synchronised
// backward buckets are made once more, in the order in which rank 0's became
// ready, as large as the limits say. (Not with find_unused_parameters, as in
// Python, where that order may be another each time.)
//
// Sparse gradients, and the map of used parameters, are reduced at the end of
// backward.
//
// Where the group reduces by collectives, these, their order, sizes and dtypes
// are those of Python's DistributedDataParallel (its gradient reducer) for
// dense gradients, so that Python ranks may stand in the group.
//
// Threads: the methods are for the thread that trains; hooks run on autograd's.
class Reducer {
 public:
  // `parameters`: leaves that require grad, the same on every rank (see
  // verify_same_model). Collective.
  Reducer(std::vector<TrainedParameter> parameters, ProcessGroupPtr group,
          ReducerOptions options);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer();

  // Before each forward. `synchronize`: whether the backward that follows is to
  // average, or only accumulates on this rank (no_sync). Collective when it
  // rebuilds the buckets: behind the first backward that averaged.
  void prepare(bool synchronize);
  // Behind the forward, if a backward is to follow.
  void expect_backward();
  // What the sum over the ranks is divided by from the next backward on; the
  // group's size by default. The same on all ranks.
  void set_divisor(double divisor) { divisor_ = divisor; }

  // The part of one backward of a rank that has none (join): zeros. Leaves the
  // averages in the gradients, for a sharded optimizer. Collective with the
  // backward of the others.
  void shadow_backward();
  // Behind the last of these: they are no rank's to accumulate on.
  void drop_gradients();

  // Instead of the averaging all-reduce. Once, before the first backward.
  void register_comm_hook(CommHook hook);
  bool has_comm_hook() const { return static_cast<bool>(hook_); }
  void delay(DelayedBucket delayed);

  // Sharded gradients: `owned[i]`, elements of parameters()[i] in memory
  // order, are what of them is averaged on this rank; the others' gradients are
  // undefined behind backward. Over all ranks each element is owned once.
  // Where the group cannot (see make_bucket_reduction) all are averaged.
  // Collective; between backward passes; not with a comm hook.
  // `is_stepped(i)`: whether parameters()[i] has a gradient that matters, so
  // that a backward on top of its shards throws std::logic_error.
  using IsStepped = std::function<bool(size_t parameter)>;
  void shard(std::vector<ElementRange> owned, IsStepped is_stepped);

  // Called in backward, in its thread, in the order of the buckets, when the
  // gradients of these parameters() are final on this rank (with
  // find_unused_parameters or a check at the end of backward).
  using OnFinal = std::function<void(const std::vector<size_t>& parameters)>;
  void on_final(OnFinal callback) { on_final_ = std::move(callback); }

  // New hooks on the parameters' gradient accumulators, which LibTorch makes
  // anew when a parameter's dtype changes. Called back when backward has
  // ended, or was given up.
  void hook_parameters();
  void on_backward_end(std::function<void()> callback) {
    on_backward_end_ = std::move(callback);
  }

  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  // The parameters' names, bucket by bucket, in the order of reduction.
  std::vector<std::vector<std::string>> bucket_names() const;
  // What of DDPLoggingData the reducer knows.
  void describe(DDPLoggingData& data) const;
  DdpTimes& times() { return times_; }
  // Backward passes that were averaged, with those of the reducer that this one
  // takes over from.
  int64_t steps() const { return steps_before_ + times_.iteration(); }
  void continue_from(int64_t steps) { steps_before_ = steps; }

 private:
  // Where a parameter's gradient lies, and what this backward knows of it.
  struct Place {
    static constexpr size_t kNone = ~size_t{0};
    size_t bucket = kNone;  // none: sparse, or left out as unused
    size_t slot = 0;
    bool ready = false;
    bool unused = false;     // no gradient from this backward
    int expected_calls = 1;  // of its hook, in a static graph
    int calls = 0;
  };

  void set_buckets(const std::vector<std::vector<size_t>>& buckets);
  void connect();
  std::vector<size_t> bucketed() const;
  void rebuild_buckets();
  bool may_rebuild() const;

  void start_round();
  void await_end();
  void enter_backward();
  void on_gradient(size_t parameter);
  void mark_unreachable();
  void mark_unused(size_t parameter);
  void mark_ready(size_t parameter);
  void publish_ready_buckets();
  // False: only at the end of backward, as something else has its slot.
  bool take_gradient(size_t parameter);
  void take_displaced();
  void restore_displaced();
  void place_gradients();
  bool places_gradients() const;
  void remember_shards();
  void remember_shard(size_t parameter);
  bool is_left_shard(size_t parameter, int changes = 0) const;
  void refuse_left_shards(size_t first);
  void take_batch(const Bucket& bucket);
  void end_backward();
  void learn_static_graph();
  void finish();
  void finish_sparse();
  void finish_used_map();
  void deliver(size_t final_buckets);
  void deliver_sparse();
  void reset_backward();
  void give_up_backward();
  bool grads_are_aliases() const;
  bool searches_unused() const {
    return options_.find_unused_parameters && !options_.static_graph;
  }
  bool counts_calls() const { return options_.static_graph && !learnt_; }
  bool delivers_at_end() const {
    return needs_used_map() || options_.check_for_nan_in_grad;
  }
  // The same on all ranks.
  bool needs_used_map() const {
    return searches_unused() ||
           (options_.static_graph && times_.iteration() == 0);
  }

  std::string names_without_gradient() const;
  std::vector<at::Tensor> tensors() const;
  std::string this_rank() const;

  std::vector<NamedParameter> parameters_;
  std::vector<at::ScalarType> dtypes_;  // of their gradients
  std::vector<bool> sparse_;
  ProcessGroupPtr group_;
  ReducerOptions options_;
  double divisor_;
  CommHook hook_{};
  std::optional<DelayedBucket> delayed_{};
  std::optional<GradientCheck> check_{};
  std::vector<ElementRange> owned_{};  // by parameter; empty: all are
  IsStepped is_stepped_{};
  // Gradients as the last backward left them, if in shards; by parameter.
  struct LeftShard {
    c10::weak_intrusive_ptr<c10::TensorImpl> gradient;
    int64_t version;
  };
  std::map<size_t, LeftShard> left_shards_{};
  OnFinal on_final_{};
  std::function<void()> on_backward_end_{};

  std::vector<Bucket> buckets_;
  std::unique_ptr<BucketReduction> reduction_;
  GradientPlacement placement_;
  // Gradients whose slots hold something else, and that, saved meanwhile.
  struct Displaced {
    size_t parameter;
    at::Tensor tenant;
  };
  std::vector<Displaced> displaced_;
  std::vector<Place> places_;  // by parameter
  // Left out of the buckets (skip_all_reduce_unused_params).
  std::vector<bool> excluded_;

  struct Hook {
    // LibTorch's own handle: its type differs between releases.
    decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) accumulator;
    uintptr_t key;
  };
  std::vector<Hook> hooks_;

  // GPU gradients are ready on autograd's device threads. Recursive: a
  // communication hook, called under it, may ask for bucket_names() and the
  // like.
  mutable std::recursive_mutex mutex_;
  bool synchronize_ = true;
  bool in_backward_ = false;
  int graph_task_ = -1;  // the last whose end calls end_backward()
  int open_tasks_ = 0;   // of these, nested in one another
  // From the first gradient to the last averaged one.
  std::optional<Span> backward_span_;
  size_t missing_ = 0;           // parameters not ready
  std::vector<size_t> pending_;  // of these, by bucket
  size_t next_bucket_ = 0;       // the first that is not published
  size_t delivered_ = 0;         // to on_final_
  double factor_ = 1;            // of contributions
  bool shadows_ = false;         // shadow_backward()
  // By parameter: used on this rank since the last average; the same of the
  // average before; by no rank.
  std::vector<int> used_;
  std::vector<int> last_used_;
  std::vector<bool> unused_everywhere_;
  bool used_differently_ = false;
  std::vector<bool> sparse_missing_;  // had no gradient, by parameter
  std::vector<size_t> ready_order_;
  std::vector<size_t> last_ready_order_;
  bool rebuilt_ = false;
  bool learnt_ = false;  // the static graph
  DdpTimes times_;
  int64_t steps_before_ = 0;
};

}  // namespace lockstep
