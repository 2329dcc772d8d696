#include "lockstep/parallel/ddp/reducer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lockstep/parallel/ddp/buckets.h"
#include "lockstep/parallel/ddp/hook_reduction.h"
#include "lockstep/trace/current_call.h"

namespace lockstep::internal {
namespace {

// Returns the sparse gradient of an embedding that was not used.
at::Tensor no_rows(const at::Tensor& parameter) {
  const auto options = parameter.options().requires_grad(false);
  auto sizes = parameter.sizes().vec();
  sizes[0] = 0;
  return at::_sparse_coo_tensor_unsafe(
             at::empty({1, 0}, options.dtype(at::kLong)),
             at::empty(sizes, options), parameter.sizes())
      ._coalesced_(true);
}

// The ranks compare one number for each reduction: which one it is, and how
// many forwards before it had no backward.
constexpr int64_t kMostForwards = 1 << 16;

int64_t iteration_code(int64_t number, int64_t left_out) {
  return number * kMostForwards + std::min(left_out, kMostForwards - 1);
}

IterationWords iteration_words() {
  return {
      .name =
          [](int64_t code) {
            return c10::str("iteration ", code / kMostForwards);
          },
      .difference = "the ranks average different iterations",
      .described =
          [](int64_t code) {
            const auto forwards = code % kMostForwards;
            return c10::str("number ", code / kMostForwards, " after ",
                            forwards, forwards == 1 ? " forward" : " forwards",
                            " without a backward");
          },
      .remedy =
          "every rank must average equally often. A rank that made more "
          "forwards without a backward has skipped a step, say: let all ranks "
          "skip it, all_reduce() whether one must; make forwards that need no "
          "backward under torch::NoGradGuard or in eval mode"};
}

[[noreturn]] void refuse_beside_sharing(const std::string& what) {
  throw std::invalid_argument(
      "DistributedDataParallel: another wrapper averages some of the "
      "parameters, too; " +
      what +
      " cannot be used then. Put the modules that share them into one module, "
      "and wrap that module");
}

}  // namespace

Reducer::Reducer(const std::vector<TrainedParameter>& parameters,
                 ProcessGroupPtr group, ReducerOptions options,
                 std::weak_ptr<const void> owner)
    : group_(std::move(group)),
      options_(std::move(options)),
      gradients_(parameters, group_,
                 {.views = options_.gradient_as_bucket_view,
                  .reduce_dtype = options_.reduce_dtype,
                  .place_gradients = options_.place_gradients}),
      readiness_(parameters.size(), options_.static_graph),
      tracker_(
          BackwardTracker::make(*this, gradients_.tensors(), std::move(owner))),
      divisor_(group_->size()),
      used_(parameters.size()) {
  if (options_.check_for_nan_in_grad) {
    check_.emplace(this->parameters(), group_);
  }
  rebuilt_ = options_.learnt.has_value();
  set_buckets(rebuilt_ ? *options_.learnt
                       : first_buckets(gradients_.tensors(), bucketed(),
                                       options_.first_limits));
  tracker_->watch();
}

Reducer::~Reducer() {
  tracker_->detach();
  if (armed_) armed_->disarm();
}

// The number in the default group, as in all messages.
std::string Reducer::this_rank() const {
  return "rank " + std::to_string(group_->global_rank(group_->rank()));
}

std::vector<size_t> Reducer::bucketed() const {
  std::vector<size_t> indices;
  for (size_t i = 0; i < parameters().size(); ++i) {
    if (!gradients_.is_sparse(i) && !readiness_.is_excluded(i)) {
      indices.push_back(i);
    }
  }
  return indices;
}

void Reducer::set_buckets(const std::vector<std::vector<size_t>>& members) {
  reduction_.reset();  // first, because it uses the buckets
  gradients_.arrange(members);
  connect();
}

// Makes the reduction for the current buckets.
void Reducer::connect() {
  if (hook_) {
    reduction_ =
        hook_buckets(gradients_.buckets(), parameters(), hook_, group_);
  } else if (options_.beside_python) {  // which knows no other way
    reduction_ = all_reduce_buckets(gradients_.reduced_buckets(), group_);
  } else if (gradients_.buckets().empty()) {  // all are sparse or frozen
    reduction_ = make_iteration_check(group_, all_on_cpu(parameters()));
  } else {
    const auto& arena = gradients_.arena();
    reduction_ = make_bucket_reduction(
        gradients_.reduced_buckets(),
        gradients_.is_sharded() ? Results::owned : Results::everywhere, group_,
        arena ? arena->memory() : at::Tensor());
  }
  reduction_->word_iterations(iteration_words());
  // A check reads the buckets.
  gradients_.allow_moves(reduction_->moves() && !check_);
}

void Reducer::require_no_training() const {
  if (hook_) {
    throw std::logic_error(
        "register_comm_hook: there is a communication hook already; register "
        "only one, which may call others");
  }
  if (gradients_.is_sharded()) {
    throw std::logic_error(
        "register_comm_hook: gradients are reduced in shards for a sharded "
        "optimizer; a hook needs whole buckets: construct "
        "ZeroRedundancyOptimizer from the parameters instead");
  }
  if (steps_ != 0 || readiness_.is_collecting()) {
    throw std::logic_error(
        "register_comm_hook: training has begun; register the hook before the "
        "first backward");
  }
}

void Reducer::register_comm_hook(CommHook hook) {
  require_no_training();
  hook_ = std::move(hook);
  connect();
}

void Reducer::shard(std::vector<Range> owned, IsStepped is_stepped) {
  if (hook_) {
    throw std::logic_error(
        "gradients cannot be sharded if a communication hook reduces whole "
        "buckets: construct ZeroRedundancyOptimizer from the parameters "
        "instead");
  }
  refuse_shared("a sharded optimizer");
  gradients_.own(std::move(owned));
  is_stepped_ = std::move(is_stepped);
  connect();
}

void Reducer::on_final(OnFinal callback) {
  refuse_shared("an optimizer that steps in backward");
  on_final_ = std::move(callback);
}

void Reducer::around_graphs(std::function<void()> entered,
                            std::function<void()> left) {
  refuse_shared("mixed_precision.param_dtype");
  entered_ = std::move(entered);
  left_ = std::move(left);
}

void Reducer::refuse_shared(const char* what) const {
  if (gradients_.any_shared()) refuse_beside_sharing(what);
}

void Reducer::refuse_sharing() const {
  const char* what = gradients_.is_sharded() ? "a sharded optimizer"
                     : on_final_ ? "an optimizer that steps in backward"
                     : entered_  ? "mixed_precision.param_dtype"
                                 : nullptr;
  if (what != nullptr) refuse_beside_sharing(what);
}

void Reducer::parameter_shared(size_t parameter) {
  gradients_.share(parameter);
}

void Reducer::continue_from(Reducer& before) {
  steps_ = before.steps_;
  begun_ = before.begun_;
  for (size_t i = 0; i < before.used_.size(); ++i) {
    if (before.used_[i] == 0) continue;
    const auto& tensor = before.parameters()[i].tensor;
    const auto here = std::ranges::find_if(
        parameters(),
        [&](const NamedParameter& own) { return own.tensor.is_same(tensor); });
    // A parameter that is frozen now keeps its mark for later.
    if (here == parameters().end()) continue;
    before.used_[i] = 0;
    used_[static_cast<size_t>(here - parameters().begin())] = 1;
  }
}

void Reducer::settle() {
  tracker_->require_idle();
  const std::lock_guard lock(tracker_->mutex());
  // Backward may accumulate into the buckets before the reduction begins.
  reduction_->reclaim();
}

void Reducer::prepare() {
  const UserFunction function("forward()");
  settle();
  if (std::exchange(stepped_, false)) {
    throw std::runtime_error(
        this_rank() +
        ": an exception ended a backward in which optimizers step, so some "
        "parameters may have been stepped on some ranks only; load a snapshot "
        "on all ranks");
  }
  const std::lock_guard lock(tracker_->mutex());
  // Also under no_sync, as in Python.
  if (may_rebuild()) rebuild_buckets();
  times_.forward_begins();
}

bool Reducer::may_rebuild() const {
  // Python's rank learns the order of a static graph one backward later.
  const int64_t first = options_.beside_python && options_.static_graph ? 2 : 1;
  return !rebuilt_ && !readiness_.is_collecting() &&
         times_.iteration() >= first &&
         (!searches_unused() || excludes_unused());
}

// Returns whether this bucket is not reduced, because no rank uses it: Python's
// form of skip_all_reduce_unused_params.
bool Reducer::skips(size_t bucket) const {
  return options_.skip_all_reduce_unused_params && options_.beside_python &&
         !readiness_.learns() &&
         std::ranges::all_of(gradients_.buckets()[bucket].slots,
                             [this](const GradientBucket::Slot& slot) {
                               return readiness_.is_unused(slot.parameter);
                             });
}

void Reducer::rebuild_buckets() {
  const Span span("ddp", "rebuild_buckets");
  rebuilt_ = true;
  if (excludes_unused()) {
    readiness_.exclude(unused_everywhere_);
  }
  auto order = readiness_.last_order();
  std::erase_if(order, [&](size_t i) {
    return gradients_.is_sparse(i) || readiness_.is_excluded(i);
  });
  // Adds the parameters that were unused, at least on this rank.
  auto members = bucketed();
  for (auto at = members.rbegin(); at != members.rend(); ++at) {
    if (std::ranges::find(order, *at) == order.end()) order.push_back(*at);
  }
  if (order.empty()) return set_buckets({});
  set_buckets(order_of_rank_zero(
      assign_buckets(gradients_.tensors(), order, options_.limits),
      parameters()[order[0]].tensor.device(), group_));
}

std::optional<std::vector<std::vector<size_t>>> Reducer::learnt_buckets()
    const {
  // The unused parameters would have to be learnt, too.
  if (!rebuilt_ || excludes_unused()) return std::nullopt;
  std::vector<std::vector<size_t>> members;
  for (const auto& bucket : gradients_.buckets()) {
    auto& list = members.emplace_back();
    for (const auto& slot : bucket.slots) list.push_back(slot.parameter);
  }
  return members;
}

void Reducer::drop_gradients() {
  for (const auto& parameter : parameters()) {
    parameter.tensor.mutable_grad().reset();
  }
}

void Reducer::begin(int64_t left_out) {
  reduction_->begin(iteration_code(++begun_, left_out), divisor_);
}

void Reducer::begin_reduction(int64_t left_out) {
  times_.backward_begins();
  if (Span::observed()) {
    backward_span_.emplace(Span::detached(
        "ddp", "backward",
        {{"group", group_->name()},
         {"buckets", static_cast<int64_t>(gradients_.buckets().size())}}));
  }
  next_bucket_ = delivered_ = 0;
  pending_.clear();
  for (const auto& bucket : gradients_.buckets()) {
    pending_.push_back(bucket.slots.size());
  }
  begin(left_out);
  gradients_.forget_moves();
  factor_ = reduction_->contribution_factor();
}

void Reducer::backward_begins(int64_t left_out) {
  const UserFunction function("backward()");
  readiness_.begin();
  used_before_ = used_;
  try {
    begin_reduction(left_out);
    gradients_.part();
    refuse_left_shards(std::nullopt);
    for (size_t i = 0; i < parameters().size(); ++i) {
      if (readiness_.is_never_used(i)) set_unused(i);
    }
    if (!searches_unused()) return;
    // Parameters that this graph does not reach are unused.
    const auto reachable = tracker_->reachable();
    // If the graph reaches none, nested passes bring the gradients (the whole
    // module is checkpointed).
    if (std::ranges::find(reachable, true) == reachable.end()) return;
    for (size_t i = 0; i < reachable.size(); ++i) {
      if (!reachable[i]) set_unused(i);
    }
  } catch (...) {
    give_up();
    throw;
  }
}

void Reducer::set_unused(size_t parameter) {
  if (readiness_.set_unused(parameter)) mark_ready(parameter);
}

void Reducer::gradient_accumulated(size_t parameter, const at::Tensor& added) {
  const UserFunction function("backward()");
  refuse_left_shards(parameter);
  if (needs_used_map()) used_[parameter] = 1;
  switch (readiness_.count(parameter)) {
    case Readiness::Gradient::awaits_more:
      return;
    case Readiness::Gradient::surplus:
      refuse_surplus(parameter);
    case Readiness::Gradient::ready:
      mark_ready(parameter, added);
      publish_ready_buckets();
  }
}

void Reducer::local_gradient(size_t parameter, bool ours) {
  if (ours && needs_used_map()) used_[parameter] = 1;
  refuse_left_shards(parameter);
  // Another wrapper may be the one that averages.
  if (!ours && !gradients_.is_shared(parameter)) foreign_(parameter);
}

void Reducer::refuse_surplus(size_t parameter) const {
  throw std::runtime_error(
      this_rank() + ": the gradient of '" + parameters()[parameter].name +
      "' " +
      (readiness_.is_excluded(parameter)
           ? "came, but no rank used it in the first backward, and "
             "skip_all_reduce_unused_params leaves such parameters out"
       : readiness_.is_unused(parameter)
           ? "came in a nested backward pass, which find_unused_parameters "
             "cannot see beforehand; if the graph is the same each time, set "
             "static_graph"
       : entered_
           ? "came twice in one backward: with mixed_precision.param_dtype "
             "each "
             "forward has low-precision parameters of its own, so a backward "
             "may go through one forward only. Call backward() for each, under "
             "no_sync() for all but the last, or set static_graph if every "
             "iteration makes equally many forwards"
           : "became ready twice in one backward; a parameter may take part in "
             "nested backward passes (checkpointed parts that share it) only "
             "with static_graph"));
}

void Reducer::mark_ready(size_t parameter, const at::Tensor& added) {
  if (readiness_.awaited() == 0) times_.last_gradient();
  // The gradient that made this mark, under no_sync(), has been dropped.
  if (readiness_.is_unused(parameter) &&
      !parameters()[parameter].tensor.grad().defined()) {
    used_[parameter] = 0;
  }
  if (!gradients_.has_place(parameter)) return;
  gradients_.take(parameter, factor_, readiness_.is_unused(parameter), added);
  --pending_[gradients_.bucket_of(parameter)];
}

void Reducer::publish_ready_buckets() {
  // With two wrappers in one backward, each publishes when its own backward
  // ends, one after the other.
  if (gradients_.any_shared() && tracker_->is_averaging()) return;
  const auto& buckets = gradients_.buckets();
  while (next_bucket_ < buckets.size() && pending_[next_bucket_] == 0) {
    gradients_.use_on_current_stream(next_bucket_);
    if (check_) check_->look(buckets[next_bucket_]);
    times_.bucket_published();
    const size_t bucket = next_bucket_++;
    const Span span("ddp", "publish_bucket",
                    {{"bucket", static_cast<int64_t>(bucket)}});
    if (skips(bucket)) {
      reduction_->skip(bucket);
    } else {
      reduction_->publish(bucket, gradients_.moved_places(bucket));
    }
  }
  const auto final_buckets = reduction_->advance();
  if (!delivers_at_end()) deliver(final_buckets);
}

void Reducer::backward_ends() {
  const UserFunction function("backward()");
  try {
    if (readiness_.awaited() != 0) {
      if (readiness_.learns()) {
        readiness_.learn();
        for (size_t i = 0; i < parameters().size(); ++i) {
          if (!readiness_.is_excluded(i)) mark_ready(i);
        }
        if (options_.beside_python) used_sum_ = sum_used();
      } else if (searches_unused()) {
        for (size_t i = 0; i < parameters().size(); ++i) set_unused(i);
      } else {
        refuse_missing();
      }
    }
    publish_ready_buckets();
    readiness_.end();
    finish();
  } catch (...) {
    give_up();
    throw;
  }
}

void Reducer::refuse_missing() const {
  constexpr int kMostNames = 5;
  std::string names;
  int count = 0;
  for (size_t i = 0; i < parameters().size(); ++i) {
    if (readiness_.is_ready(i)) continue;
    if (++count <= kMostNames) {
      names += (names.empty() ? "'" : ", '") + parameters()[i].name + "'";
    }
  }
  if (count > kMostNames) {
    names += " and " + std::to_string(count - kMostNames) + " more";
  }
  if (options_.static_graph) {
    throw std::runtime_error(
        this_rank() + ": backward ended with fewer gradients for " + names +
        " than in the first backward; with static_graph every iteration must "
        "use the same parameters equally often. If iterations differ, set "
        "find_unused_parameters instead of static_graph");
  }
  throw std::runtime_error(
      this_rank() + ": backward ended without a gradient for " + names +
      "; every parameter that requires grad must take part in the loss on "
      "every rank. Set find_unused_parameters, or static_graph if the same "
      "ones are unused each time; requires_grad_(false) excludes a parameter");
}

// Throws if a backward would add to gradients of which this rank has only its
// own part. `accumulated`: the backward has added to this gradient already. The
// first gradient of a backward shows whether the others were left as they were,
// so only that one is checked.
void Reducer::refuse_left_shards(std::optional<size_t> accumulated) {
  if (!gradients_.is_sharded()) return;
  const auto left = gradients_.left_shard(is_stepped_, accumulated);
  if (accumulated || left) gradients_.forget_shards();
  if (!left) return;
  throw std::logic_error(
      this_rank() + ": the gradient of '" + parameters()[*left].name +
      "' is still that of the previous backward; each rank has the average of "
      "its own shard only, so a backward cannot add to this gradient: call "
      "zero_grad() before the next backward, and accumulate under no_sync() "
      "before the one that averages");
}

void Reducer::backward_given_up() { give_up(); }

// Peers that continue would average this iteration without this rank. So they
// are told that this rank gives up, and the next forward waits until they have
// given up, too.
void Reducer::forward_lost(int64_t left_out) noexcept {
  try {
    begin(left_out);
    reduction_->abandon();
  } catch (const std::exception&) {
    // The group is broken; the next forward reports that.
  }
}

// Peers may still write results into the buckets, so no gradient may stay
// there.
void Reducer::give_up() {
  reduction_->abandon();
  gradients_.abandon();
  if (check_) check_->forget();
  backward_span_.reset();
  if (!shadows_) used_ = used_before_;
  readiness_.give_up();
  used_sum_.reset();
  stepped_ = static_cast<bool>(on_final_);
}

void Reducer::graph_entered() {
  if (gradients_.moves()) {
    armed_ = gradients_.arena();
    armed_->arm();
  }
  if (entered_) entered_();
}

void Reducer::graph_left() {
  if (const auto arena = std::exchange(armed_, nullptr)) arena->disarm();
  if (left_) left_();
}

void Reducer::finish() {
  {
    // The part of communication that computation did not hide.
    const Span wait_span("ddp", "wait");
    reduction_->finish();
  }
  finish_sparse();
  if (needs_used_map()) finish_used_map();
  if (check_) check_->agree(steps_);
  deliver(gradients_.buckets().size());
  deliver_sparse();
  times_.backward_ended();
  ++steps_;
  if (gradients_.is_sharded()) gradients_.remember_shards();
  gradients_.forget_moves();
  backward_span_.reset();
}

void Reducer::finish_sparse() {
  const at::NoGradGuard no_grad;
  sparse_missing_.assign(parameters().size(), false);
  for (size_t i = 0; i < parameters().size(); ++i) {
    if (!gradients_.is_sparse(i)) continue;
    // The first backward of a static graph has shown that no rank uses it.
    if (!needs_used_map() && !unused_everywhere_.empty() &&
        unused_everywhere_[i]) {
      continue;
    }
    const auto& tensor = parameters()[i].tensor;
    auto& grad = tensor.mutable_grad();
    sparse_missing_[i] = !grad.defined();
    // Every rank must use one sparse dimension, as embeddings do.
    auto sum = shadows_ || !grad.defined() ? no_rows(tensor)
               : grad.is_sparse()          ? grad.coalesce()
                                           : grad.to_sparse(/*sparse_dim=*/1);
    if (check_) check_->look(i, sum._values());
    if (options_.reduce_dtype) sum = sum.to(*options_.reduce_dtype);
    if (group_->size() > 1) {
      sum = at::mul(sum, at::scalar_tensor(1 / divisor_, at::kDouble));
      all_reduce(sum, {.group = group_});
    }
    grad = sum.to(gradients_.dtype(i));
  }
}

at::Tensor Reducer::sum_used() const {
  auto sum = at::tensor(used_, at::kInt).to(group_->control_device());
  if (group_->size() > 1) all_reduce(sum, {.group = group_});
  return sum.cpu();
}

// Finds the parameters that some rank used. The others keep the gradient they
// had.
void Reducer::finish_used_map() {
  const auto map =
      used_sum_.defined() ? std::exchange(used_sum_, at::Tensor()) : sum_used();
  const auto* counts = map.const_data_ptr<int>();
  unused_everywhere_.assign(parameters().size(), false);
  for (size_t i = 0; i < parameters().size(); ++i) {
    unused_everywhere_[i] = counts[i] == 0;
    if (gradients_.is_sparse(i) && unused_everywhere_[i] &&
        sparse_missing_[i]) {
      parameters()[i].tensor.mutable_grad().reset();
    }
  }
  if (!shadows_) {
    used_differently_ |= !last_used_.empty() && last_used_ != used_;
    last_used_ = used_;
  }
  std::ranges::fill(used_, 0);
}

// Delivers the results of the buckets before `final_buckets`.
void Reducer::deliver(size_t final_buckets) {
  const bool nothing_to_do = gradients_.all_views() && !on_final_ &&
                             !needs_used_map() && !shadows_ &&
                             !options_.static_graph;
  if (nothing_to_do) return;
  std::vector<size_t> final_parameters;
  for (; delivered_ < final_buckets; ++delivered_) {
    final_parameters.clear();
    for (const auto& slot : gradients_.buckets()[delivered_].slots) {
      const size_t i = slot.parameter;
      const bool is_unused =
          !unused_everywhere_.empty() && unused_everywhere_[i];
      if (!is_unused) gradients_.give(i);
      // An optimizer also steps a parameter that kept the gradient it had, such
      // as zeros from zero_grad(false): moments and weight decay change it.
      if (!is_unused || parameters()[i].tensor.grad().defined()) {
        final_parameters.push_back(i);
      }
    }
    if (!on_final_) continue;
    // Memory that an optimizer allocates for good is not for the arena.
    if (armed_) armed_->disarm();
    on_final_(final_parameters);
    if (armed_) armed_->arm();
  }
}

void Reducer::deliver_sparse() {
  if (!on_final_) return;
  std::vector<size_t> final_parameters;
  for (size_t i = 0; i < parameters().size(); ++i) {
    if (gradients_.is_sparse(i) && parameters()[i].tensor.grad().defined()) {
      final_parameters.push_back(i);
    }
  }
  if (!final_parameters.empty()) on_final_(final_parameters);
}

void Reducer::shadow_backward() {
  const std::lock_guard lock(tracker_->mutex());
  struct Shadowing {
    bool& flag;
    ~Shadowing() { flag = false; }
  } shadowing{shadows_};
  shadows_ = true;
  try {
    begin_reduction(tracker_->shadow_averaging());
    gradients_.release();
    // Zeros are contributed instead of what no_sync() has accumulated.
    std::ranges::fill(used_, 0);
    const at::NoGradGuard no_grad;
    for (size_t bucket = 0; bucket < gradients_.buckets().size(); ++bucket) {
      gradients_.buckets()[bucket].flat.zero_();
      reduction_->publish(bucket);
    }
    finish();
  } catch (...) {
    give_up();
    throw;
  }
}

std::vector<std::vector<std::string>> Reducer::bucket_names() const {
  const std::lock_guard lock(tracker_->mutex());
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : gradients_.buckets()) {
    auto& list = names.emplace_back();
    for (const auto& slot : bucket.slots) {
      list.push_back(parameters()[slot.parameter].name);
    }
  }
  return names;
}

void Reducer::describe(DDPLoggingData& data) const {
  const std::lock_guard lock(tracker_->mutex());
  data.bucket_cap_bytes = options_.limits;
  data.find_unused_parameters = options_.find_unused_parameters;
  data.gradient_as_bucket_view = options_.gradient_as_bucket_view;
  data.static_graph = options_.static_graph;
  data.comm_hook = hook_ ? "user" : "allreduce";
  gradients_.describe(data);
  data.has_rebuilt_buckets = rebuilt_;
  data.prev_iteration_grad_ready_order_indices = readiness_.last_order();
  for (size_t i = 0; i < unused_everywhere_.size(); ++i) {
    if (unused_everywhere_[i]) {
      data.unused_parameter_size +=
          static_cast<int64_t>(parameters()[i].tensor.nbytes());
    }
  }
  data.can_set_static_graph = options_.static_graph || !used_differently_;
  times_.describe(data);
  data.iteration = steps_;
}

}  // namespace lockstep::internal
