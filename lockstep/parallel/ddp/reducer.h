#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/span.h"
#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/backward_tracker.h"
#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/parallel/ddp/comm_hook.h"
#include "lockstep/parallel/ddp/delayed_bucket.h"
#include "lockstep/parallel/ddp/gradient_buckets.h"
#include "lockstep/parallel/ddp/gradient_check.h"
#include "lockstep/parallel/ddp/logging_data.h"
#include "lockstep/parallel/ddp/readiness.h"

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
  bool check_for_nan_in_grad{false};
  std::optional<at::ScalarType> reduce_dtype{};
};

// Averages gradients over the ranks of a group while backward computes them:
// publishes each bucket when its gradients are ready, and finishes what is left
// at the end of backward. It stands on three concepts, a class each: whose a
// backward is and when it ends (backward_tracker.h), which gradients are ready
// (readiness.h), and where gradients live (gradient_buckets.h). What moves the
// buckets is a BucketReduction.
//
// The last ready parameter of a bucket publishes it; each gradient goes on with
// what all ranks have published, and the end of backward waits for the rest.
// Buckets are published in their order on every rank, whatever the order of
// readiness. Where another wrapper averages some of the parameters, all are
// published at the end, so that two wrappers do not mix their collectives.
//
// The first backward has one bucket for each dtype and device: in which order
// gradients become ready is not known yet. After the first backward that
// averaged, buckets are made once more, in the order in which rank 0's became
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
// Threads: the methods are for the thread that trains; the listener's are
// called in autograd's.
class Reducer final : private BackwardListener {
 public:
  // `parameters`: leaves that require grad, the same on every rank (see
  // verify_same_model). `owner`: the wrapper; its reducers do not count as
  // others of each other. Collective.
  Reducer(const std::vector<TrainedParameter>& parameters,
          ProcessGroupPtr group, ReducerOptions options, const void* owner);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer() override;

  // Before each forward in grad mode. Collective when it makes the buckets
  // anew: after the first backward that averaged.
  void prepare();
  // The part of prepare() that ends an iteration that was given up. Collective
  // with that of the other ranks if there is one.
  void settle();
  // Where forward runs (BackwardTracker::begin_forward() and on).
  BackwardTracker& tracker() { return *tracker_; }
  // What the sum over the ranks is divided by from the next backward on; the
  // group's size by default. The same on all ranks.
  void set_divisor(double divisor) { divisor_ = divisor; }

  // The part of one backward of a rank that has none (join): zeros. Leaves the
  // averages in the gradients, for a sharded optimizer. Collective with the
  // backward of the others.
  void shadow_backward();
  // After the last of these: no rank may accumulate onto these gradients.
  void drop_gradients();

  // Instead of the averaging all-reduce. Once, before the first backward.
  void register_comm_hook(CommHook hook);
  bool has_comm_hook() const { return static_cast<bool>(hook_); }
  void delay(DelayedBucket delayed);

  // Sharded gradients: `owned[i]`, elements of parameters()[i] in memory
  // order, are what of them is averaged on this rank; the others' gradients are
  // undefined after backward. Over all ranks each element is owned once.
  // Where the group cannot (see make_bucket_reduction) all are averaged.
  // Collective; between backward passes; not with a comm hook, and not where
  // another wrapper averages some of the parameters.
  // `is_stepped(i)`: whether parameters()[i] has a gradient that matters, so
  // that a backward on top of its shards throws std::logic_error.
  using IsStepped = std::function<bool(size_t parameter)>;
  void shard(std::vector<ElementRange> owned, IsStepped is_stepped);

  // Called in backward, in its thread, in the order of the buckets, when the
  // gradients of these parameters() are final on this rank (with
  // find_unused_parameters or a check at the end of backward). Not where
  // another wrapper averages some of the parameters.
  using OnFinal = std::function<void(const std::vector<size_t>& parameters)>;
  void on_final(OnFinal callback);

  // Called before and after autograd works on graphs of the wrapper's
  // forwards. Not where another wrapper averages some of the parameters.
  void around_graphs(std::function<void()> entered, std::function<void()> left);

  const std::vector<NamedParameter>& parameters() const {
    return gradients_.parameters();
  }
  // The parameters' names, bucket by bucket, in the order of reduction.
  std::vector<std::vector<std::string>> bucket_names() const;
  // What of DDPLoggingData the reducer knows.
  void describe(DDPLoggingData& data) const;
  DdpTimes& times() { return times_; }
  // Backward passes that were averaged, with those of the reducers that this
  // one has taken over from.
  int64_t steps() const { return steps_; }
  // Takes the counts of the wrapper's reducer that was used so far.
  void continue_from(const Reducer& before);

 private:
  void backward_begins() override;
  void gradient_accumulated(size_t parameter) override;
  void backward_ends() override;
  void backward_given_up() override;
  void local_gradient(size_t parameter, bool ours) override;
  void graph_entered() override;
  void graph_left() override;
  void refuse_sharing(size_t parameter) const override;
  void parameter_shared(size_t parameter) override;
  void forward_lost() noexcept override;

  void set_buckets(const std::vector<std::vector<size_t>>& members);
  void connect();
  std::vector<size_t> bucketed() const;
  void rebuild_buckets();
  bool may_rebuild() const;

  void begin_reduction();
  void set_unused(size_t parameter);
  void mark_ready(size_t parameter);
  void publish_ready_buckets();
  void refuse_left_shards(std::optional<size_t> accumulated);
  [[noreturn]] void refuse_surplus(size_t parameter) const;
  [[noreturn]] void refuse_missing() const;
  void finish();
  void finish_sparse();
  void finish_used_map();
  void deliver(size_t final_buckets);
  void deliver_sparse();
  void give_up();

  bool searches_unused() const {
    return options_.find_unused_parameters && !options_.static_graph;
  }
  bool delivers_at_end() const {
    return needs_used_map() || options_.check_for_nan_in_grad ||
           gradients_.any_shared();
  }
  // The same on all ranks.
  bool needs_used_map() const {
    return searches_unused() ||
           (options_.static_graph && times_.iteration() == 0);
  }
  void refuse_shared(const char* what) const;
  std::string this_rank() const;

  ProcessGroupPtr group_;
  ReducerOptions options_;
  GradientBuckets gradients_;
  Readiness readiness_;
  std::shared_ptr<BackwardTracker> tracker_;
  std::unique_ptr<BucketReduction> reduction_;

  double divisor_;
  CommHook hook_{};
  std::optional<DelayedBucket> delayed_{};
  std::optional<GradientCheck> check_{};
  IsStepped is_stepped_{};
  OnFinal on_final_{};
  std::function<void()> entered_{};
  std::function<void()> left_{};

  // From the first gradient to the last averaged one.
  std::optional<Span> backward_span_;
  std::vector<size_t> pending_;  // gradients that are not ready, by bucket
  size_t next_bucket_ = 0;       // the first that is not published
  size_t delivered_ = 0;
  double factor_ = 1;     // of contributions
  bool shadows_ = false;  // shadow_backward()
  bool stepped_ = false;  // on_final_ may have been called, then given up
  // Indexed by parameter: 1 if this rank has used it since the last average.
  std::vector<int> used_;
  std::vector<int> used_before_;  // what used_ was when this backward began
  std::vector<int> last_used_;    // what used_ was at the last average
  std::vector<bool> unused_everywhere_;  // no rank used it in the last average
  bool used_differently_ = false;
  std::vector<bool> sparse_missing_;  // had no gradient, by parameter
  bool rebuilt_ = false;
  DdpTimes times_;
  int64_t steps_ = 0;
  // How many reductions the wrapper has begun, including those given up. The
  // ranks compare it.
  int64_t begun_ = 0;
};

}  // namespace lockstep
