#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/bucket_reduction.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/parallel/ddp/backward_tracker.h"
#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/parallel/ddp/comm_hook.h"
#include "lockstep/parallel/ddp/ddp_times.h"
#include "lockstep/parallel/ddp/gradient_buckets.h"
#include "lockstep/parallel/ddp/readiness.h"
#include "lockstep/trace/span.h"

namespace lockstep::internal {

// The options of DistributedDataParallel that the reducer implements; they are
// described there.
struct ReducerOptions {
  BucketLimits limits;
  // The limits until the order of readiness is known. Empty means one bucket
  // for each dtype and device.
  BucketLimits first_limits{};
  bool find_unused_parameters{false};
  bool static_graph{false};
  bool gradient_as_bucket_view{true};
  bool place_gradients{true};
  bool skip_all_reduce_unused_params{false};
  bool check_for_nan_in_grad{false};
  std::optional<at::ScalarType> reduce_dtype{};
  // Whether Python's DistributedDataParallel may be on other ranks.
  bool beside_python{false};
  // The parameters of each bucket, as learnt_buckets() returned them, if the
  // order of readiness is known already.
  std::optional<std::vector<std::vector<size_t>>> learnt{};
};

// Averages gradients over the ranks of a group while backward computes them:
// publishes each bucket when its gradients are ready, and finishes the rest at
// the end of backward. It is built of three classes, which know whose a
// backward is and when it ends (backward_tracker.h), which gradients are ready
// (readiness.h), and where gradients live (gradient_buckets.h). A
// BucketReduction moves the buckets.
//
// The parameter of a bucket that is ready last publishes the bucket. Each
// gradient that arrives also continues the reduction of what all ranks have
// published, and the end of backward waits for the rest. Buckets are published
// in the same order on every rank, whatever the order of readiness. If another
// wrapper averages some of the parameters, all buckets are published at the
// end, so that the collectives of two wrappers do not mix.
//
// The first backward has one bucket for each dtype and device, because it is
// not known yet in which order gradients become ready. After the first
// averaging backward the buckets are made once more, in the order in which rank
// 0's gradients became ready, as large as the limits say. (Not with
// find_unused_parameters, as in Python, because that order may change each
// time.)
//
// Sparse gradients and the map of used parameters are reduced at the end of
// backward.
//
// If the group reduces by collectives, their order, sizes and dtypes are those
// of Python's DistributedDataParallel (its gradient reducer) for dense
// gradients, so that Python ranks may be in the group.
//
// Threads: the training thread calls the public methods; autograd's threads
// call those of the listener.
class Reducer final : private BackwardListener {
 public:
  // `parameters`: leaves that require grad, the same on every rank (see
  // verify_same_model). `owner`: as in BackwardTracker::make(). Collective.
  Reducer(const std::vector<TrainedParameter>& parameters,
          ProcessGroupPtr group, ReducerOptions options,
          std::weak_ptr<const void> owner);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer() override;

  // Called before each forward in grad mode. Collective when it makes the
  // buckets anew: after the first averaging backward.
  void prepare();
  // The part of prepare() that cleans up after an iteration that was given up.
  // Collective with the other ranks' call in that case.
  void settle();
  // Forward reports to this tracker (BackwardTracker::begin_forward() and the
  // following functions).
  BackwardTracker& tracker() { return *tracker_; }
  // Sets the number by which the sum over the ranks is divided from the next
  // backward on; the default is the group's size. The same on all ranks.
  void set_divisor(double divisor) { divisor_ = divisor; }

  // Takes part in one backward of the other ranks, with zeros, on a rank that
  // has none of its own (join). Leaves the averages in the gradients, for a
  // sharded optimizer. Collective with the backward of the others.
  void shadow_backward();
  // Called after the last shadow_backward(): no rank may accumulate onto these
  // gradients.
  void drop_gradients();

  // Uses `hook` instead of the averaging all-reduce. Call it once, before the
  // first backward; require_no_training() throws std::logic_error otherwise.
  void require_no_training() const;
  void register_comm_hook(CommHook hook);
  bool has_comm_hook() const { return static_cast<bool>(hook_); }

  // Shards the gradients: of each parameters()[i] this rank gets the average
  // only of the elements `owned[i]` (in memory order); its gradients elsewhere
  // are undefined after backward. Over all ranks each element is owned once. If
  // the group cannot do this (see make_bucket_reduction), all elements are
  // averaged on every rank. Collective; call it between backward passes. Not
  // possible with a comm hook, or if another wrapper averages some of the
  // parameters. `is_stepped(i)`: whether the optimizer steps parameters()[i];
  // if it does, a backward that would add to the shards of its gradient throws
  // std::logic_error.
  using IsStepped = std::function<bool(size_t parameter)>;
  void shard(std::vector<Range> owned, IsStepped is_stepped);

  // Sets a callback that is called in backward, in its thread, in the order of
  // the buckets, when the gradients of these parameters() are final on this
  // rank (with find_unused_parameters or a check: at the end of backward). Not
  // possible if another wrapper averages some of the parameters.
  using OnFinal = std::function<void(const std::vector<size_t>& parameters)>;
  void on_final(OnFinal callback);

  // Sets callbacks that are called before and after autograd works on graphs of
  // the wrapper's forwards. Not possible if another wrapper averages some of
  // the parameters.
  void around_graphs(std::function<void()> entered, std::function<void()> left);

  // Sets a callback that is called in a backward that goes through no forward
  // of the wrapper, when it has added to the gradient of parameters()[i].
  void on_foreign_gradient(std::function<void(size_t parameter)> callback) {
    foreign_ = std::move(callback);
  }

  // Returns the parameters of each bucket if they are in the order of
  // readiness; nothing as long as that is not known.
  std::optional<std::vector<std::vector<size_t>>> learnt_buckets() const;

  const std::vector<NamedParameter>& parameters() const {
    return gradients_.parameters();
  }
  // Returns whether the gradient of parameters()[i] is sparse. It is averaged
  // on every rank, even after shard().
  bool is_sparse(size_t i) const { return gradients_.is_sparse(i); }
  // Returns the parameters' names, bucket by bucket, in the order of reduction.
  std::vector<std::vector<std::string>> bucket_names() const;
  // Fills in the fields of DDPLoggingData that the reducer knows.
  void describe(DDPLoggingData& data) const;
  DdpTimes& times() { return times_; }
  // Returns the number of backward passes that were averaged, including those
  // of the reducers that this one replaced.
  int64_t steps() const { return steps_; }
  // Continues the counts of the reducer that the wrapper used before, and takes
  // over which parameters have a gradient that is not averaged yet (from
  // backward passes under no_sync).
  void continue_from(Reducer& before);

 private:
  void backward_begins(int64_t left_out) override;
  void gradient_accumulated(size_t parameter, const at::Tensor& added) override;
  void backward_ends() override;
  void backward_given_up() override;
  void local_gradient(size_t parameter, bool ours) override;
  void graph_entered() override;
  void graph_left() override;
  void refuse_sharing() const override;
  void parameter_shared(size_t parameter) override;
  void forward_lost(int64_t left_out) noexcept override;

  void set_buckets(const std::vector<std::vector<size_t>>& members);
  void connect();
  std::vector<size_t> bucketed() const;
  void rebuild_buckets();
  bool may_rebuild() const;
  bool skips(size_t bucket) const;

  void begin(int64_t left_out);
  void begin_reduction(int64_t left_out);
  void set_unused(size_t parameter);
  // `added`: as in GradientBuckets::take().
  void mark_ready(size_t parameter, const at::Tensor& added = {});
  void publish_ready_buckets();
  void refuse_left_shards(std::optional<size_t> accumulated);
  [[noreturn]] void refuse_surplus(size_t parameter) const;
  [[noreturn]] void refuse_missing() const;
  void finish();
  void finish_sparse();
  at::Tensor sum_used() const;
  void finish_used_map();
  void deliver(size_t final_buckets);
  void deliver_sparse();
  void give_up();

  bool searches_unused() const {
    return options_.find_unused_parameters && !options_.static_graph;
  }
  bool excludes_unused() const {
    return options_.skip_all_reduce_unused_params && !options_.beside_python;
  }
  bool delivers_at_end() const {
    return needs_used_map() || options_.check_for_nan_in_grad ||
           gradients_.any_shared();
  }
  // Equal on all ranks.
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
  std::optional<GradientCheck> check_{};
  IsStepped is_stepped_{};
  OnFinal on_final_{};
  std::function<void()> entered_{};
  std::function<void()> left_{};
  std::function<void(size_t)> foreign_{};
  std::shared_ptr<GradientArena> armed_{};  // while autograd works on graphs

  // From the first gradient to the last averaged one.
  std::optional<Span> backward_span_;
  std::vector<size_t> pending_;  // gradients that are not ready, by bucket
  size_t next_bucket_ = 0;       // the first that is not published
  size_t delivered_ = 0;
  double factor_ = 1;     // for contributions
  bool shadows_ = false;  // shadow_backward()
  bool stepped_ = false;  // on_final_ may have run in a backward given up
  // For each parameter: 1 if this rank has used it since the last average of
  // the wrapper that included it.
  std::vector<int> used_;
  std::vector<int> used_before_;         // used_ when this backward began
  std::vector<int> last_used_;           // used_ at the last average
  at::Tensor used_sum_;                  // over the ranks, if known early
  std::vector<bool> unused_everywhere_;  // no rank used it at the last average
  bool used_differently_ = false;
  std::vector<bool> sparse_missing_;  // by parameter: had no gradient
  bool rebuilt_ = false;
  DdpTimes times_;
  int64_t steps_ = 0;
  // How many reductions the wrapper has begun, including those that were given
  // up. The ranks compare this number, and how many forwards were left out.
  int64_t begun_ = 0;
};

}  // namespace lockstep::internal
