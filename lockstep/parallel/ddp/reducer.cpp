#include "lockstep/parallel/ddp/reducer.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

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

// Everyone's gradients at once. They come in reverse order of the parameters,
// mostly, and so do these buckets.
std::vector<std::vector<size_t>> first_buckets(
    const std::vector<at::Tensor>& tensors) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  constexpr auto kNoLimit = std::numeric_limits<int64_t>::max();
  auto buckets = assign_buckets(tensors, order, {kNoLimit, kNoLimit});
  std::ranges::sort(buckets, std::greater());  // by their first parameter
  return buckets;
}

// Collective: the buckets of rank 0, which need not be as many as ours. In two
// parts, the first of which has the same length on every rank: all members and
// the number of buckets, then the buckets' lengths.
std::vector<std::vector<size_t>> of_rank_zero(
    const std::vector<std::vector<size_t>>& buckets, c10::Device device,
    const ProcessGroupPtr& group) {
  if (group->size() == 1) return buckets;
  auto from_rank_zero = [&](const std::vector<int>& numbers) {
    auto sent = at::tensor(numbers, at::kInt).to(device);
    broadcast(sent, group->global_ranks()[0], {.group = group});
    sent = sent.cpu();
    const auto* data = sent.const_data_ptr<int>();
    return std::vector<int>(data, data + sent.numel());
  };
  std::vector<int> members;
  std::vector<int> lengths;
  for (const auto& bucket : buckets) {
    for (size_t index : bucket) members.push_back(static_cast<int>(index));
    lengths.push_back(static_cast<int>(bucket.size()));
  }
  members.push_back(static_cast<int>(buckets.size()));
  members = from_rank_zero(members);
  lengths.resize(members.back());
  lengths = from_rank_zero(lengths);
  std::vector<std::vector<size_t>> agreed;
  auto next = members.begin();
  for (int length : lengths) {
    agreed.emplace_back(next, next + length);
    next += length;
  }
  return agreed;
}

}  // namespace

Reducer::Reducer(std::vector<NamedParameter> parameters, ProcessGroupPtr group,
                 const BucketLimits& limits)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      limits_(limits),
      share_(at::scalar_tensor(1.0 / group_->size(), at::kDouble)),
      places_(parameters_.size()) {
  set_buckets(first_buckets(tensors()));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // The accumulator is kept: a parameter holds its own only weakly, and the
    // hook would go with it.
    auto accumulator =
        torch::autograd::impl::grad_accumulator(parameters_[i].tensor);
    auto key = accumulator->add_post_hook(
        std::make_unique<ReadyHook>([this, i] { mark_ready(i); }));
    hooks_.push_back({std::move(accumulator), key});
  }
}

Reducer::~Reducer() {
  for (auto& hook : hooks_) hook.accumulator->del_post_hook(hook.key);
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

void Reducer::set_buckets(const std::vector<std::vector<size_t>>& buckets) {
  buckets_.clear();
  for (const auto& members : buckets) {
    buckets_.push_back(make_bucket(parameters_, members, group_));
    const auto& slots = buckets_.back().slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      places_[slots[slot].parameter] = {buckets_.size() - 1, slot};
    }
  }
  reset_backward();
}

void Reducer::prepare(bool synchronize) {
  // Left over where an exception ended the last backward.
  if (in_backward_) reset_backward();
  // Under no_sync, too, as Python does: only a whole backward counts.
  if (!rebuilt_ && ready_order_.size() == parameters_.size()) rebuild_buckets();
  synchronize_ = synchronize;
}

void Reducer::rebuild_buckets() {
  Span span("ddp", "rebuild_buckets");
  auto agreed = of_rank_zero(assign_buckets(tensors(), ready_order_, limits_),
                             parameters_[0].tensor.device(), group_);
  auto old_buckets = std::move(buckets_);
  auto old_places = places_;
  set_buckets(agreed);
  // Gradients that are still wanted (accumulation) move along.
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& grad = parameters_[i].tensor.mutable_grad();
    const auto& old_alias =
        old_buckets[old_places[i].bucket].slots[old_places[i].slot].alias;
    if (!grad.defined() || !same_memory(grad, old_alias)) continue;
    auto& alias = buckets_[places_[i].bucket].slots[places_[i].slot].alias;
    alias.copy_(grad);
    grad = alias;
  }
  rebuilt_ = true;
}

void Reducer::reset_backward() {
  in_backward_ = false;
  backward_span_.reset();
  next_bucket_ = 0;
  works_.clear();
  pending_.clear();
  for (const auto& bucket : buckets_) pending_.push_back(bucket.slots.size());
  for (auto& place : places_) place.ready = place.undivided = false;
}

void Reducer::start_backward() {
  in_backward_ = true;
  backward_span_.emplace(
      "ddp", "backward",
      std::initializer_list<SpanAttribute>{
          {"group", group_->name()},
          {"buckets", static_cast<int64_t>(buckets_.size())}});
  ready_order_.clear();
  // Runs on the thread that called backward(), after its last gradient.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this] { finish_backward(); });
}

void Reducer::mark_ready(size_t parameter) {
  std::lock_guard lock(mutex_);
  if (!synchronize_) return;
  if (!in_backward_) start_backward();
  Place& place = places_[parameter];
  if (place.ready) {
    auto name = parameters_[parameter].name;
    reset_backward();
    throw std::runtime_error(
        this_rank() + ": the gradient of '" + name +
        "' became ready twice in one backward; a parameter may not take part "
        "in nested backward passes (checkpointed parts that share it)");
  }
  place.ready = true;
  ready_order_.push_back(parameter);
  take_gradient(parameter);
  --pending_[place.bucket];
  while (next_bucket_ < buckets_.size() && pending_[next_bucket_] == 0) {
    start_reduction(buckets_[next_bucket_++]);
  }
}

// Brings the parameter's gradient into its bucket.
void Reducer::take_gradient(size_t parameter) {
  Place& place = places_[parameter];
  auto& alias = buckets_[place.bucket].slots[place.slot].alias;
  auto& grad = parameters_[parameter].tensor.mutable_grad();
  at::NoGradGuard no_grad;
  if (!grad.defined()) {
    alias.zero_();
  } else if (grad.layout() != c10::kStrided) {
    throw std::runtime_error(
        this_rank() + ": the gradient of '" + parameters_[parameter].name +
        "' is sparse, which DistributedDataParallel does not reduce; build "
        "the embedding with sparse(false)");
  } else if (same_memory(grad, alias)) {
    place.undivided = true;
    return;
  } else if (group_->size() == 1) {
    alias.copy_(grad);
  } else {
    at::mul_out(alias, grad, share_);
  }
  grad = alias;
}

void Reducer::start_reduction(Bucket& bucket) {
  if (group_->size() == 1) return;
  at::NoGradGuard no_grad;
  double factor = 1.0 / group_->size();
  auto undivided = [&](const Bucket::Slot& slot) {
    return places_[slot.parameter].undivided;
  };
  if (std::ranges::all_of(bucket.slots, undivided)) {
    bucket.flat.mul_(factor);
  } else {
    for (auto& slot : bucket.slots) {
      if (undivided(slot)) slot.alias.mul_(factor);
    }
  }
  works_.push_back(
      all_reduce(bucket.flat, {.group = group_, .async_op = true}));
}

void Reducer::finish_backward() {
  std::lock_guard lock(mutex_);
  if (!in_backward_) return;
  if (next_bucket_ < buckets_.size()) {
    auto names = names_without_gradient();
    reset_backward();
    throw std::runtime_error(
        this_rank() + ": backward ended without a gradient for " + names +
        "; every parameter that requires grad must take part in the loss on "
        "every rank (requires_grad_(false) before wrapping leaves one out)");
  }
  auto works = std::move(works_);
  auto backward_span = std::move(backward_span_);
  reset_backward();
  // What of the communication the computation did not hide.
  Span wait_span("ddp", "wait");
  for (auto& work : works) work->wait();
}

std::string Reducer::names_without_gradient() const {
  constexpr int kMostNames = 5;
  std::string names;
  int count = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (places_[i].ready) continue;
    if (++count <= kMostNames) {
      names += (names.empty() ? "'" : ", '") + parameters_[i].name + "'";
    }
  }
  if (count > kMostNames) {
    names += " and " + std::to_string(count - kMostNames) + " more";
  }
  return names;
}

std::vector<std::vector<std::string>> Reducer::bucket_names() const {
  std::lock_guard lock(mutex_);
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : buckets_) {
    auto& list = names.emplace_back();
    for (const auto& slot : bucket.slots) {
      list.push_back(parameters_[slot.parameter].name);
    }
  }
  return names;
}

}  // namespace lockstep
