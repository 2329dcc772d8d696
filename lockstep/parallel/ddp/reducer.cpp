#include "lockstep/parallel/ddp/reducer.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/parallel/ddp/bucket_order.h"
#include "lockstep/parallel/ddp/hook_reduction.h"

namespace lockstep {
namespace {

class ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  explicit ReadyHook(std::function<void()> ready) : ready_(std::move(ready)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*inputs*/) override {
    ready_();
    return outputs;
  }

 private:
  std::function<void()> ready_;
};

}  // namespace

Reducer::Reducer(std::vector<TrainedParameter> parameters,
                 ProcessGroupPtr group, ReducerOptions options)
    : group_(std::move(group)),
      options_(std::move(options)),
      divisor_(group_->size()),
      places_(parameters.size()),
      excluded_(parameters.size()),
      used_(parameters.size()) {
  for (auto& [named, sparse] : parameters) {
    dtypes_.push_back(named.tensor.scalar_type());
    parameters_.push_back(std::move(named));
    sparse_.push_back(sparse);
  }
  if (options_.check_for_nan_in_grad) check_.emplace(parameters_, group_);
  set_buckets(first_buckets(tensors(), bucketed(), options_.first_limits));
  hook_parameters();
}

Reducer::~Reducer() {
  for (auto& hook : hooks_) hook.accumulator->del_post_hook(hook.key);
}

void Reducer::hook_parameters() {
  for (auto& hook : hooks_) hook.accumulator->del_post_hook(hook.key);
  hooks_.clear();
  auto add = [this](const at::Tensor& parameter, std::function<void()> call) {
    // The accumulator is kept: a parameter holds its own only weakly, and the
    // hook would go with it.
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    auto key = accumulator->add_post_hook(
        std::make_unique<ReadyHook>(std::move(call)));
    hooks_.push_back({std::move(accumulator), key});
  };
  for (size_t i = 0; i < parameters_.size(); ++i) {
    add(parameters_[i].tensor, [this, i] { on_gradient(i); });
  }
  place_gradients();
  if (delayed_) {
    add(delayed_->hook(), [this] {
      std::lock_guard lock(mutex_);
      if (!synchronize_) return;
      enter_backward();
      delayed_->start(divisor_);
    });
  }
}

// Of the default group, as all messages say it.
std::string Reducer::this_rank() const {
  return "rank " + std::to_string(group_->global_rank(group_->rank()));
}

std::vector<at::Tensor> Reducer::tensors() const {
  std::vector<at::Tensor> all;
  for (const auto& parameter : parameters_) all.push_back(parameter.tensor);
  return all;
}

std::vector<size_t> Reducer::bucketed() const {
  std::vector<size_t> indices;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!sparse_[i] && !excluded_[i]) indices.push_back(i);
  }
  return indices;
}

void Reducer::set_buckets(const std::vector<std::vector<size_t>>& buckets) {
  // First: it works on the buckets.
  reduction_.reset();
  buckets_.clear();
  for (auto& place : places_) place.bucket = Place::kNone;
  for (const auto& members : buckets) {
    buckets_.push_back(make_bucket(parameters_, members, group_,
                                   options_.reduce_dtype, places_gradients()));
    const auto& slots = buckets_.back().slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      auto& place = places_[slots[slot].parameter];
      place.bucket = buckets_.size() - 1;
      place.slot = slot;
    }
  }
  connect();
  if (!hooks_.empty()) place_gradients();
  reset_backward();
}

// What reduces the buckets that there are.
void Reducer::connect() {
  if (hook_) {
    reduction_ = hook_buckets(buckets_, parameters_, hook_, group_);
    return;
  }
  if (buckets_.empty()) {  // all sparse, or delayed
    reduction_ = all_reduce_buckets({}, group_);
    return;
  }
  std::vector<ReducedBucket> reduced;
  for (const auto& bucket : buckets_) {
    auto& one = reduced.emplace_back(ReducedBucket{.flat = bucket.flat});
    if (owned_.empty()) continue;
    auto own = [&ranges = one.owned](int64_t begin, int64_t end) {
      if (begin == end) return;
      if (!ranges.empty() && ranges.back().end == begin) {
        ranges.back().end = end;
      } else {
        ranges.push_back({begin, end});
      }
    };
    int64_t behind = 0;
    for (const auto& [parameter, offset, alias] : bucket.slots) {
      // The zeros before large parameters are someone's, too.
      if (group_->rank() == 0) own(behind, offset);
      own(offset + owned_[parameter].begin, offset + owned_[parameter].end);
      behind = offset + alias.numel();
    }
  }
  const bool is_sharded = !owned_.empty();
  reduction_ = make_bucket_reduction(
      std::move(reduced), is_sharded ? Results::owned : Results::everywhere,
      group_);
}

void Reducer::register_comm_hook(CommHook hook) {
  if (hook_) {
    throw std::logic_error(
        "register_comm_hook: there is a communication hook already; register "
        "one, which may call others");
  }
  if (!owned_.empty()) {
    throw std::logic_error(
        "register_comm_hook: gradients are reduced in shards for a sharded "
        "optimizer; a hook needs whole buckets: construct "
        "ZeroRedundancyOptimizer from the parameters instead");
  }
  if (steps() != 0 || in_backward_) {
    throw std::logic_error(
        "register_comm_hook: training has begun; register the hook before the "
        "first backward");
  }
  hook_ = std::move(hook);
  set_buckets(first_buckets(tensors(), bucketed(), options_.first_limits));
}

void Reducer::delay(DelayedBucket delayed) {
  delayed_.emplace(std::move(delayed));
  hook_parameters();
}

void Reducer::shard(std::vector<ElementRange> owned, IsStepped is_stepped) {
  if (hook_) {
    throw std::logic_error(
        "gradients cannot be sharded behind a communication hook, which "
        "reduces whole buckets: construct ZeroRedundancyOptimizer from the "
        "parameters instead");
  }
  owned_ = std::move(owned);
  is_stepped_ = std::move(is_stepped);
  connect();
}

void Reducer::prepare(bool synchronize) {
  std::lock_guard lock(mutex_);
  // Left over where an exception ended the last backward.
  if (in_backward_) give_up_backward();
  graph_task_ = -1;
  open_tasks_ = 0;
  placement_.disarm();
  // Backward may accumulate in the buckets before the first hook is called.
  reduction_->reclaim();
  if (delayed_) delayed_->reclaim();
  // Under no_sync, too, as Python does.
  if (may_rebuild()) rebuild_buckets();
  synchronize_ = synchronize;
  times_.forward_begins();
}

void Reducer::expect_backward() {
  if (synchronize_) placement_.arm();
}

bool Reducer::may_rebuild() const {
  return !rebuilt_ && times_.iteration() > 0 &&
         (!searches_unused() || options_.skip_all_reduce_unused_params);
}

void Reducer::rebuild_buckets() {
  Span span("ddp", "rebuild_buckets");
  rebuilt_ = true;
  if (options_.skip_all_reduce_unused_params) excluded_ = unused_everywhere_;
  auto order = last_ready_order_;
  std::erase_if(order, [&](size_t i) { return sparse_[i] || excluded_[i]; });
  // Those that were unused, on this rank at least.
  auto members = bucketed();
  for (auto at = members.rbegin(); at != members.rend(); ++at) {
    if (std::ranges::find(order, *at) == order.end()) order.push_back(*at);
  }
  if (order.empty()) return set_buckets({});
  auto agreed =
      order_of_rank_zero(assign_buckets(tensors(), order, options_.limits),
                         parameters_[order[0]].tensor.device(), group_);
  // Gradients that are still wanted (accumulation) move along.
  auto old_buckets = std::move(buckets_);
  auto old_places = places_;
  reduction_.reset();
  set_buckets(agreed);
  at::NoGradGuard no_grad;
  for (size_t i : members) {
    auto& grad = parameters_[i].tensor.mutable_grad();
    const auto& old = old_places[i];
    const auto& old_alias = old_buckets[old.bucket].slots[old.slot].alias;
    const bool is_shard = is_left_shard(i);
    if (!grad.defined() || !same_memory(grad, old_alias)) continue;
    auto& alias = buckets_[places_[i].bucket].slots[places_[i].slot].alias;
    alias.copy_(grad);
    grad = alias;
    if (is_shard) remember_shard(i);
  }
}

void Reducer::reset_backward() {
  in_backward_ = false;
  placement_.disarm();
  displaced_.clear();
  graph_task_ = -1;
  open_tasks_ = 0;
  backward_span_.reset();
  next_bucket_ = delivered_ = 0;
  missing_ = 0;
  pending_.clear();
  for (const auto& bucket : buckets_) pending_.push_back(bucket.slots.size());
  for (size_t i = 0; i < places_.size(); ++i) {
    auto& place = places_[i];
    place.ready = excluded_[i];
    place.unused = false;
    place.calls = 0;
    if (!place.ready) ++missing_;
  }
  ready_order_.clear();
}

// Peers may still write results of this round into the buckets, so no gradient
// may stay there.
void Reducer::give_up_backward() {
  for (const auto& bucket : buckets_) {
    for (const auto& slot : bucket.slots) {
      auto& grad = parameters_[slot.parameter].tensor.mutable_grad();
      if (grad.defined() && same_memory(grad, slot.alias)) grad.reset();
    }
  }
  if (delayed_) delayed_->give_up();
  if (check_) check_->forget();
  reset_backward();
  if (on_backward_end_) on_backward_end_();
}

void Reducer::drop_gradients() {
  for (const auto& parameter : parameters_) {
    parameter.tensor.mutable_grad().reset();
  }
  if (delayed_) delayed_->give_up();
}

void Reducer::start_round() {
  in_backward_ = true;
  times_.backward_begins();
  if (Span::observed()) {
    backward_span_.emplace(
        "ddp", "backward",
        std::initializer_list<SpanAttribute>{
            {"group", group_->name()},
            {"buckets", static_cast<int64_t>(buckets_.size())}});
  }
  reduction_->begin(divisor_);
  factor_ = reduction_->contribution_factor();
}

// Has end_backward() called behind the last gradient of the backward pass that
// is under way, on the thread that called backward().
void Reducer::await_end() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == graph_task_) return;
  graph_task_ = task;
  ++open_tasks_;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this] { end_backward(); });
}

// The first gradient of a backward, or of one nested in it.
void Reducer::enter_backward() {
  await_end();
  if (in_backward_) return;
  start_round();
  if (searches_unused()) mark_unreachable();
  if (options_.static_graph && learnt_) {
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i].expected_calls == 0) mark_unused(i);
    }
  }
}

// What this backward will not come to. It knows its nodes, so neither the
// module's outputs nor what of them the loss uses have to be known.
void Reducer::mark_unreachable() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;  // those that stay out are seen at the end
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!nodes->contains(hooks_[i].accumulator.get())) mark_unused(i);
  }
}

void Reducer::mark_unused(size_t parameter) {
  if (places_[parameter].ready) return;
  places_[parameter].unused = true;
  mark_ready(parameter);
}

void Reducer::on_gradient(size_t parameter) {
  std::lock_guard lock(mutex_);
  if (needs_used_map()) used_[parameter] = 1;
  if (!synchronize_) {
    refuse_left_shards(parameter);
    if (on_backward_end_) await_end();
    return;
  }
  refuse_left_shards(parameter);
  enter_backward();
  auto& place = places_[parameter];
  ++place.calls;
  if (counts_calls()) {
    ready_order_.push_back(parameter);  // its last one counts
    return;
  }
  if (options_.static_graph && place.calls < place.expected_calls) return;
  if (place.ready) {
    const auto& name = parameters_[parameter].name;
    const bool excluded = excluded_[parameter];
    const bool unused = place.unused;
    give_up_backward();
    throw std::runtime_error(
        this_rank() + ": the gradient of '" + name + "' " +
        (excluded ? "came, though the first backward did not use it and "
                    "skip_all_reduce_unused_params says that it stays so"
         : unused ? "came in a nested backward pass, which "
                    "find_unused_parameters cannot see beforehand; if the "
                    "graph is the same each time, set static_graph"
                  : "became ready twice in one backward; a parameter may take "
                    "part in nested backward passes (checkpointed parts that "
                    "share it) only with static_graph"));
  }
  mark_ready(parameter);
  publish_ready_buckets();
}

void Reducer::mark_ready(size_t parameter) {
  auto& place = places_[parameter];
  place.ready = true;
  --missing_;
  if (missing_ == 0) times_.last_gradient();
  if (!place.unused && !counts_calls()) ready_order_.push_back(parameter);
  if (place.bucket == Place::kNone) return;
  if (options_.batched_grad_copy || take_gradient(parameter)) {
    --pending_[place.bucket];
  }
}

void Reducer::publish_ready_buckets() {
  while (next_bucket_ < buckets_.size() && pending_[next_bucket_] == 0) {
    const auto& bucket = buckets_[next_bucket_];
    if (options_.batched_grad_copy) take_batch(bucket);
    if (check_) check_->look(bucket);
    times_.bucket_published();
    reduction_->publish(next_bucket_++);
  }
  const auto final_buckets = reduction_->advance();
  if (!delivers_at_end()) deliver(final_buckets);
}

void Reducer::end_backward() {
  std::lock_guard lock(mutex_);
  if (open_tasks_ == 0) return;  // given up
  graph_task_ = -1;
  // The end of a backward pass within another, which comes here, too.
  if (--open_tasks_ > 0) return;
  if (!in_backward_) {  // no_sync
    if (torch::autograd::get_current_node() == nullptr) on_backward_end_();
    return;
  }
  if (missing_ != 0) {
    // Within another of which no gradient came yet.
    if (torch::autograd::get_current_node() != nullptr) return;
    if (counts_calls()) {
      learn_static_graph();
    } else if (searches_unused()) {
      for (size_t i = 0; i < places_.size(); ++i) mark_unused(i);
      publish_ready_buckets();
    } else {
      auto names = names_without_gradient();
      give_up_backward();
      throw std::runtime_error(
          this_rank() + ": backward ended without a gradient for " + names +
          "; every parameter that requires grad must take part in the loss on "
          "every rank. Set find_unused_parameters, or static_graph if it is "
          "the same each time; requires_grad_(false) leaves one out");
    }
  }
  finish();
}

// How often each parameter's hook was called, and in which order for the last
// time. All gradients go out together, this once.
void Reducer::learn_static_graph() {
  std::vector<size_t> order;
  for (auto at = ready_order_.rbegin(); at != ready_order_.rend(); ++at) {
    if (std::ranges::find(order, *at) == order.end()) order.push_back(*at);
  }
  std::ranges::reverse(order);
  ready_order_ = std::move(order);
  for (size_t i = 0; i < places_.size(); ++i) {
    places_[i].expected_calls = places_[i].calls;
    places_[i].unused = places_[i].calls == 0;
    mark_ready(i);
  }
  publish_ready_buckets();
}

void Reducer::finish() {
  try {
    if (!shadows_) take_displaced();
    {
      // What of the communication the computation did not hide.
      Span wait_span("ddp", "wait");
      reduction_->finish();
    }
    finish_sparse();
    if (delayed_) delayed_->finish();
    if (needs_used_map()) finish_used_map();
    if (check_) check_->agree(steps());
    deliver(buckets_.size());
    deliver_sparse();
    restore_displaced();
  } catch (...) {
    give_up_backward();
    throw;
  }
  times_.backward_ended();
  if (!owned_.empty()) remember_shards();
  last_ready_order_ = std::move(ready_order_);
  if (options_.static_graph && !shadows_) learnt_ = true;
  reset_backward();
  if (on_backward_end_) on_backward_end_();
}

}  // namespace lockstep
