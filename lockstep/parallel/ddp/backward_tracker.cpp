#include "lockstep/parallel/ddp/backward_tracker.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <stdexcept>
#include <thread>
#include <unordered_set>

namespace lockstep::internal {
namespace {

using torch::autograd::variable_list;

// The number of forwards that are remembered. Results announce their backward
// even after their range is forgotten.
constexpr size_t kMostRanges = 4096;
// The sequence number of AccumulateGrad nodes, which belong to no forward
// (LibTorch's NOTE [ Sequence Number ]).
constexpr uint64_t kNoSequenceNumber = std::numeric_limits<uint64_t>::max();
// The time for which the threads of GPUs may still hold a graph task that has
// failed.
constexpr std::chrono::seconds kDeathTimeout{1};

uint64_t this_thread() { return at::RecordFunction::currentThreadId(); }

}  // namespace

// Runs after autograd has accumulated a gradient.
class BackwardTracker::AccumulatedHook final
    : public torch::autograd::FunctionPostHook {
 public:
  AccumulatedHook(std::weak_ptr<BackwardTracker> tracker, size_t index)
      : tracker_(std::move(tracker)), index_(index) {}
  variable_list operator()(const variable_list& outputs,
                           const variable_list& inputs) override {
    if (const auto tracker = tracker_.lock()) {
      tracker->on_accumulated(index_, *this, inputs[0]);
    }
    return outputs;
  }
  std::shared_ptr<BackwardTracker> tracker() const { return tracker_.lock(); }
  size_t index() const { return index_; }

 private:
  const std::weak_ptr<BackwardTracker> tracker_;
  const size_t index_;
};

// A counted forward that no backward has reached yet. The hooks of its results
// share it, so it is destroyed with the last of them.
class BackwardTracker::Awaited {
 public:
  explicit Awaited(std::weak_ptr<BackwardTracker> tracker)
      : tracker_(std::move(tracker)) {}
  Awaited(const Awaited&) = delete;
  Awaited& operator=(const Awaited&) = delete;
  ~Awaited() { end(/*left_out=*/true); }
  // The node that has made one of its results.
  void add(torch::autograd::Node* node) { nodes_.push_back(node); }
  // Called when a node is destroyed: another one may get its address.
  void remove(torch::autograd::Node* node) noexcept {
    if (const auto tracker = tracker_.lock()) {
      const std::lock_guard lock(tracker->mutex_);
      std::erase(nodes_, node);
    }
  }
  bool is_in(const std::unordered_set<torch::autograd::Node*>& graph) const {
    return std::ranges::any_of(
        nodes_, [&](auto* node) { return graph.contains(node); });
  }
  void end(bool left_out) noexcept {
    if (const auto tracker = tracker_.lock()) {
      tracker->on_awaited_end(*this, left_out);
    }
  }

 private:
  const std::weak_ptr<BackwardTracker> tracker_;
  std::vector<torch::autograd::Node*> nodes_;
};

// Runs before autograd processes the node that made a result of a forward.
class BackwardTracker::ResultHook final
    : public torch::autograd::FunctionPreHook {
 public:
  // `forward`: the number of the forward if it synchronises, else 0. `awaited`:
  // null, if the forward does not count. `owner`: the wrapper, if the forward
  // trains parameters. `node`: has this hook.
  ResultHook(std::weak_ptr<BackwardTracker> tracker, uint64_t forward,
             std::shared_ptr<Awaited> awaited, std::weak_ptr<const void> owner,
             torch::autograd::Node* node)
      : tracker_(std::move(tracker)),
        forward_(forward),
        node_(node),
        awaited_(std::move(awaited)),
        owner_(std::move(owner)),
        exceptions_(std::uncaught_exceptions()) {}
  ~ResultHook() override {
    if (awaited_) awaited_->remove(node_);
    if (forward_ == 0 || std::uncaught_exceptions() <= exceptions_) return;
    if (const auto tracker = tracker_.lock()) {
      tracker->on_result_lost(forward_);
    }
  }
  variable_list operator()(const variable_list& grads) override {
    if (awaited_) awaited_->end(/*left_out=*/false);
    if (const auto tracker = tracker_.lock()) {
      tracker->on_result(forward_ != 0);
    } else if (forward_ != 0 && !owner_.expired()) {
      refuse_dropped();
    }
    return grads;
  }

 private:
  // The wrapper has dropped the tracker, so nothing averages what backward()
  // accumulates. (grad() accumulates nothing.)
  static void refuse_dropped() {
    const auto* info = torch::autograd::get_current_graph_task_exec_info();
    if (info != nullptr && !info->empty()) return;
    throw std::logic_error(
        "DistributedDataParallel: a backward goes through a forward whose "
        "buckets have been dropped, because requires_grad, dtype or device of "
        "parameters changed too often since; call backward() sooner after "
        "forward");
  }

  const std::weak_ptr<BackwardTracker> tracker_;
  const uint64_t forward_;
  torch::autograd::Node* const node_;
  const std::shared_ptr<Awaited> awaited_;
  const std::weak_ptr<const void> owner_;
  const int exceptions_;
};

// Only the graph task holds this mark. The task reaches it when all its work is
// done; if an exception ends the task, the mark is destroyed unreached.
class BackwardTracker::EndMark {
 public:
  EndMark(std::weak_ptr<BackwardTracker> tracker, int task)
      : tracker_(std::move(tracker)), task_(task) {}
  EndMark(const EndMark&) = delete;
  EndMark& operator=(const EndMark&) = delete;
  ~EndMark() {
    if (reached_) return;
    if (const auto tracker = tracker_.lock()) tracker->on_task_death(task_);
  }
  void reach() {
    reached_ = true;
    if (const auto tracker = tracker_.lock()) tracker->on_task_end(task_);
  }

 private:
  const std::weak_ptr<BackwardTracker> tracker_;
  const int task_;
  bool reached_ = false;
};

std::shared_ptr<BackwardTracker> BackwardTracker::make(
    BackwardListener& listener, const std::vector<at::Tensor>& parameters,
    std::weak_ptr<const void> owner) {
  std::shared_ptr<BackwardTracker> tracker(
      new BackwardTracker(listener, std::move(owner)));
  for (const auto& parameter : parameters) {
    tracker->watched_.push_back({.tensor = parameter, .accumulator = {}});
  }
  return tracker;
}

BackwardTracker::~BackwardTracker() {
  for (auto& watched : watched_) {
    if (watched.accumulator) watched.accumulator->del_post_hook(watched.hook);
  }
}

void BackwardTracker::detach() {
  const std::lock_guard lock(mutex_);
  listener_ = nullptr;
}

void BackwardTracker::watch() {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < watched_.size(); ++i) watch(i);
}

void BackwardTracker::watch(size_t index) {
  auto& watched = watched_[index];
  if (watched.accumulator && torch::autograd::impl::try_get_grad_accumulator(
                                 watched.tensor) == watched.accumulator) {
    return;
  }
  // The accumulator is kept alive: a parameter holds its own only weakly, and
  // the hook would vanish with it. A replaced accumulator keeps its hook as
  // long as a graph holds it.
  auto accumulator = torch::autograd::impl::grad_accumulator(watched.tensor);
  if (!accumulator) return;  // frozen
  for (const auto& hook : accumulator->post_hooks()) {
    const auto* theirs = dynamic_cast<const AccumulatedHook*>(hook.get());
    const auto other = theirs != nullptr ? theirs->tracker() : nullptr;
    if (!other || has_owner_of(*other)) continue;
    const std::lock_guard lock(other->mutex_);
    if (other->listener_ == nullptr) continue;
    listener_->refuse_sharing();
    other->listener_->refuse_sharing();
    listener_->parameter_shared(index);
    other->listener_->parameter_shared(theirs->index());
  }
  watched.hook = accumulator->add_post_hook(
      std::make_unique<AccumulatedHook>(weak_from_this(), index));
  watched.accumulator = std::move(accumulator);
}

void BackwardTracker::require_idle() {
  std::unique_lock lock(mutex_);
  if (torch::autograd::get_current_graph_task_id() == kNoTask) {
    const auto deadline = std::chrono::steady_clock::now() + kDeathTimeout;
    while (is_averaging() && std::chrono::steady_clock::now() < deadline) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      lock.lock();
    }
  }
  if (!is_averaging()) return;
  throw std::logic_error(
      "DistributedDataParallel: forward was called while a backward through "
      "the wrapper is running; call forward after backward() has returned, "
      "and checkpoint parts inside the module, not the wrapper");
}

void BackwardTracker::begin_forward(bool synchronizes, bool counts) {
  const std::lock_guard lock(mutex_);
  watch();
  synchronizes_ = synchronizes;
  if (synchronizes) ++forwards_;
  if (synchronizes && counts) {
    awaited_ = std::make_shared<Awaited>(weak_from_this());
    waiting_.push_back(awaited_.get());
  }
  forward_ = Position{this_thread(), at::sequence_number::peek()};
}

void BackwardTracker::result(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return;
  const std::lock_guard lock(mutex_);
  if (!forward_) return;
  // If the caller changes a view in place, autograd gives it another node, and
  // one to its base, whose graph goes on to the node that the base has now.
  if (tensor.is_view()) result(at::Tensor(tensor._base()));
  const auto& node = tensor.grad_fn();
  if (!node) return;
  if (is_older(*node)) return;  // passed through
  if (awaited_) awaited_->add(node.get());
  node->add_pre_hook(std::make_unique<ResultHook>(
      weak_from_this(), synchronizes_ ? forwards_ : 0, awaited_,
      !watched_.empty() ? owner_ : std::weak_ptr<const void>(), node.get()));
}

bool BackwardTracker::has_older_graph(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  if (!forward_ || !tensor.defined() || !tensor.requires_grad()) return false;
  if (tensor.is_leaf()) {
    return std::ranges::any_of(watched_, [&](const Watched& watched) {
      return watched.tensor.is_same(tensor);
    });
  }
  const auto& node = tensor.grad_fn();
  if (!is_older(*node)) return false;
  // An older graph is harmless unless it leads to a parameter: forward may just
  // pass on a tensor that it was given.
  std::unordered_set<const torch::autograd::Node*> seen{node.get()};
  std::vector<const torch::autograd::Node*> open{node.get()};
  while (!open.empty()) {
    const auto* last = open.back();
    open.pop_back();
    if (last->sequence_nr() == kNoSequenceNumber &&
        std::ranges::any_of(watched_, [&](const Watched& watched) {
          return watched.accumulator.get() == last;
        })) {
      return true;
    }
    for (const auto& edge : last->next_edges()) {
      const auto* next = edge.function.get();
      if (next != nullptr && seen.insert(next).second) open.push_back(next);
    }
  }
  return false;
}

// Returns whether the node was made before the forward that is running.
bool BackwardTracker::is_older(const torch::autograd::Node& node) const {
  return node.thread_id() == forward_->first &&
         node.sequence_nr() < forward_->second;
}

void BackwardTracker::end_forward(bool threw) {
  const std::lock_guard lock(mutex_);
  if (!forward_) return;
  remember(*forward_, {at::sequence_number::peek(), synchronizes_});
  forward_.reset();
  if (threw && synchronizes_) on_result_lost(forwards_);
  awaited_.reset();
}

void BackwardTracker::remember(Position begin, Range range) {
  if (range.end <= begin.second) return;
  auto next = ranges_.lower_bound(begin);
  // Ranges within this one are derivatives that this forward took.
  while (next != ranges_.end() && next->first.first == begin.first &&
         next->first.second < range.end) {
    std::erase(remembered_, next->first);
    next = ranges_.erase(next);
  }
  if (next != ranges_.begin()) {
    auto& [position, last] = *std::prev(next);
    if (position.first == begin.first && last.end == begin.second &&
        last.synchronizes == range.synchronizes) {
      last.end = range.end;
      return;
    }
  }
  ranges_.emplace(begin, range);
  remembered_.push_back(begin);
  if (remembered_.size() <= kMostRanges) return;
  const auto oldest = ranges_.find(remembered_.front());
  remembered_.pop_front();
  auto& end = forgotten_[oldest->first.first];
  end = std::max(end, oldest->second.end);
  ranges_.erase(oldest);
}

const BackwardTracker::Range* BackwardTracker::range_of(
    const torch::autograd::Node& node) const {
  if (node.sequence_nr() == kNoSequenceNumber) return nullptr;
  auto found = ranges_.upper_bound({node.thread_id(), node.sequence_nr()});
  if (found == ranges_.begin()) return nullptr;
  --found;
  return found->first.first == node.thread_id() &&
                 node.sequence_nr() < found->second.end
             ? &found->second
             : nullptr;
}

// Returns whether the node may be a cast that Autocast keeps: of a leaf, to a
// lower precision. The first forward under a guard makes it, of the wrapper or
// of the plain module, and the others use it, so it does not tell through which
// of them a backward goes. Autocast keeps no cast that forward returns.
bool BackwardTracker::is_kept_cast(const torch::autograd::Node& node) {
  if (node.num_outputs() != 1) return false;
  const auto& next = node.next_edge(0).function;
  return next && next->sequence_nr() == kNoSequenceNumber &&
         node.name() == "ToCopyBackward0" &&
         c10::isReducedFloatingType(
             node.input_metadata(0).dtype().toScalarType()) &&
         std::ranges::none_of(node.pre_hooks(), [](const auto& hook) {
           return dynamic_cast<const ResultHook*>(hook.get()) != nullptr;
         });
}

// LibTorch omits the root from the nodes of a graph that has one. `announced`:
// a forward under no_sync has made a part of the graph, maybe the root.
BackwardTracker::Kind BackwardTracker::kind_by_nodes(bool announced) const {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  auto kind = announced ? Kind::local : Kind::foreign;
  size_t numbered = 0;
  size_t forgotten = 0;
  for (const auto* node : *nodes) {
    if (node->sequence_nr() == kNoSequenceNumber || is_kept_cast(*node)) {
      continue;
    }
    ++numbered;
    if (const auto* range = range_of(*node)) {
      if (range->synchronizes) return Kind::averages;
      kind = Kind::local;
    }
    const auto end = forgotten_.find(node->thread_id());
    if (end != forgotten_.end() && node->sequence_nr() < end->second) {
      ++forgotten;
    }
  }
  if (kind != Kind::foreign) return kind;
  if (numbered == 0 && forwards_ > averaged_) {
    throw std::runtime_error(
        "DistributedDataParallel: a backward leads from one operation straight "
        "to parameters, while an earlier forward still waits for its backward, "
        "so the wrapper cannot tell whether its forward made this graph: "
        "return the loss from forward, add it to the other losses, or call its "
        "backward() before that forward");
  }
  if (numbered != 0 && forgotten == numbered) {
    throw std::runtime_error(
        "DistributedDataParallel: a backward goes through a graph that is "
        "older than the last " +
        std::to_string(kMostRanges) +
        " forwards, so the wrapper cannot tell whether its forward made this "
        "graph; call backward() sooner after forward");
  }
  return kind;
}

// Returns whether the graph task adds to the .grad of a watched tensor: grad()
// does not; backward() with inputs does so only for these inputs.
bool BackwardTracker::accumulates_here() const {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (info == nullptr || info->empty()) return true;
  return std::ranges::any_of(watched_, [&](const Watched& watched) {
    const auto found = info->find(watched.accumulator.get());
    return found != info->end() && found->second.needed_;
  });
}

// Returns whether grad() takes the gradient of a watched tensor.
bool BackwardTracker::takes_gradients_here() const {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (info == nullptr) return false;
  return std::ranges::any_of(watched_, [&](const Watched& watched) {
    const auto found = info->find(watched.accumulator.get());
    return found != info->end() && found->second.captures_ != nullptr;
  });
}

int64_t BackwardTracker::take_left_out() {
  averaged_ = forwards_;
  spent_ = false;
  return std::exchange(left_out_, 0);
}

BackwardTracker::Task* BackwardTracker::find_task(int id) {
  const auto found = std::ranges::find(tasks_, id, &Task::id);
  return found == tasks_.end() ? nullptr : &*found;
}

BackwardTracker::Task& BackwardTracker::track_task(Kind kind) {
  const int id = torch::autograd::get_current_graph_task_id();
  torch::autograd::Engine::get_default_engine().queue_callback(
      [mark = std::make_shared<EndMark>(weak_from_this(), id)] {
        mark->reach();
      });
  tasks_.push_back({id, kind});
  if (kind != Kind::foreign && entered_++ == 0) listener_->graph_entered();
  return tasks_.back();
}

std::optional<BackwardTracker::Kind> BackwardTracker::remove_task(int id) {
  const auto found = std::ranges::find(tasks_, id, &Task::id);
  if (found == tasks_.end()) return std::nullopt;
  const auto kind = found->kind;
  tasks_.erase(found);
  const auto derivatives =
      std::ranges::find(derivatives_, id, &Derivatives::task);
  if (derivatives != derivatives_.end()) {
    // With several GPUs another thread may have made the derivatives, and then
    // their end is not known. A backward that goes through nothing else is not
    // recognised then.
    if (derivatives->begin.first == this_thread()) {
      remember(derivatives->begin,
               {at::sequence_number::peek(), derivatives->synchronizes});
    }
    derivatives_.erase(derivatives);
  }
  return kind;
}

void BackwardTracker::begin_averaging(int id) {
  averaging_ = id;
  const auto& graph = *torch::autograd::get_current_graph_task_nodes_in_graph();
  left_out_ += std::ranges::count_if(
      waiting_, [&](const Awaited* forward) { return !forward->is_in(graph); });
  const auto left_out = take_left_out();
  try {
    refuse_second_average();
    listener_->backward_begins(left_out);
  } catch (...) {
    averaging_ = kNoTask;
    waiting_.clear();
    find_task(id)->kind = Kind::failed;
    throw;
  }
}

// Each tracker stores averaging_ before it looks at the others, so of two that
// begin at the same time (in threads of two devices) at least one sees the
// other. It takes no lock of theirs: their thread may wait for ours.
void BackwardTracker::refuse_second_average() const {
  for (const auto& watched : watched_) {
    if (!watched.accumulator) continue;
    for (const auto& hook : watched.accumulator->post_hooks()) {
      const auto* theirs = dynamic_cast<const AccumulatedHook*>(hook.get());
      const auto other = theirs != nullptr ? theirs->tracker() : nullptr;
      if (!other || other.get() == this || !has_owner_of(*other) ||
          !other->is_averaging()) {
        continue;
      }
      throw std::logic_error(
          "DistributedDataParallel: a backward goes through two forwards "
          "between which requires_grad, dtype or device of a parameter was "
          "changed, and would average the same gradients for both; call "
          "backward() for each of them, or change parameters only after "
          "backward()");
    }
  }
}

// Called before any work on a forward's graph.
void BackwardTracker::on_result(bool synchronizes) {
  const std::lock_guard lock(mutex_);
  if (listener_ == nullptr) return;
  const int id = torch::autograd::get_current_graph_task_id();
  auto* task = find_task(id);
  if (task == nullptr) {
    auto kind = Kind::observes;
    if (accumulates_here()) {
      kind = synchronizes ? Kind::averages : kind_by_nodes(/*announced=*/true);
    } else if (synchronizes && takes_gradients_here() &&
               !torch::autograd::get_current_graph_task_keep_graph()) {
      spent_ = true;
    }
    task = &track_task(kind);
  } else if (synchronizes && task->kind == Kind::foreign) {
    throw std::runtime_error(
        "DistributedDataParallel: gradients came before those of what forward "
        "returned, through operations that another thread recorded in forward; "
        "compute the loss from what forward returns");
  }
  if (at::GradMode::is_enabled() &&
      std::ranges::find(derivatives_, id, &Derivatives::task) ==
          derivatives_.end()) {
    derivatives_.push_back(
        {id, {this_thread(), at::sequence_number::peek()}, synchronizes});
  }
  // If another pass is averaging, this one is nested in it.
  if (task->kind == Kind::averages && !is_averaging()) begin_averaging(id);
}

void BackwardTracker::on_result_lost(uint64_t forward) noexcept {
  const std::lock_guard lock(mutex_);
  if (forward <= averaged_ || listener_ == nullptr) return;
  listener_->forward_lost(take_left_out());
  waiting_.clear();
}

// A forward from before the last average, or before an iteration that was given
// up, does not wait any more.
void BackwardTracker::on_awaited_end(const Awaited& forward,
                                     bool left_out) noexcept {
  const std::lock_guard lock(mutex_);
  if (std::erase(waiting_, &forward) > 0 && left_out) ++left_out_;
}

int64_t BackwardTracker::shadow_averaging() {
  const std::lock_guard lock(mutex_);
  left_out_ += static_cast<int64_t>(std::exchange(waiting_, {}).size());
  return take_left_out();
}

// Whether no hook of the user comes after `hook`, which has just run.
bool BackwardTracker::is_last(size_t index, const AccumulatedHook& hook) const {
  const auto& accumulator = watched_[index].accumulator;
  if (!accumulator) return false;
  const auto& hooks = accumulator->post_hooks();
  // The graph may hold an accumulator that was replaced.
  const auto own = std::ranges::find(
      hooks, static_cast<const torch::autograd::FunctionPostHook*>(&hook),
      [](const auto& each) { return each.get(); });
  return own != hooks.end() &&
         std::all_of(own, hooks.end(), [](const auto& each) {
           return dynamic_cast<const AccumulatedHook*>(each.get()) != nullptr;
         });
}

void BackwardTracker::on_accumulated(size_t index, const AccumulatedHook& hook,
                                     const at::Tensor& added) {
  const std::lock_guard lock(mutex_);
  if (listener_ == nullptr) return;
  bool ours = false;
  if (!is_averaging()) {
    const int id = torch::autograd::get_current_graph_task_id();
    auto* task = find_task(id);
    if (task == nullptr || task->kind == Kind::observes) {
      auto kind = kind_by_nodes(/*announced=*/false);
      // The pass is nested in a backward through a forward under no_sync.
      if (kind == Kind::foreign &&
          std::ranges::find(tasks_, Kind::local, &Task::kind) != tasks_.end()) {
        kind = Kind::local;
      }
      if (kind == Kind::foreign && spent_) kind = Kind::averages;
      if (task == nullptr) {
        task = &track_task(kind);
      } else {
        task->kind = kind == Kind::averages ? kind : Kind::local;
      }
    }
    if (task->kind == Kind::failed) return;
    if (task->kind == Kind::averages) begin_averaging(id);
    ours = task->kind == Kind::local;
  }
  if (is_averaging()) {
    // No copy of `added`, because the listener counts references to it.
    const at::Tensor none;
    listener_->gradient_accumulated(index, is_last(index, hook) ? added : none);
  } else {
    listener_->local_gradient(index, ours);
  }
}

void BackwardTracker::on_task_end(int id) {
  const std::lock_guard lock(mutex_);
  const auto kind = remove_task(id);
  if (!kind || listener_ == nullptr) return;
  if (*kind == Kind::foreign) {
    // The node that started this pass, if the pass is nested; otherwise null.
    const auto node = torch::autograd::get_current_node();
    const auto* range = node ? range_of(*node) : nullptr;
    if (range == nullptr || !range->synchronizes) return;
    throw std::runtime_error(
        "DistributedDataParallel: gradients came in a nested backward pass (a "
        "checkpointed part), and the wrapper cannot see when the outer one "
        "ends, because the loss uses no tensor that forward returned; return "
        "the tensors from which the loss is computed");
  }
  struct Leave {
    BackwardTracker& tracker;
    ~Leave() {
      if (--tracker.entered_ == 0) tracker.listener_->graph_left();
    }
  } leave{*this};
  if (averaging_ != id) return;
  averaging_ = kNoTask;
  waiting_.clear();
  listener_->backward_ends();
}

void BackwardTracker::on_task_death(int id) noexcept {
  const std::lock_guard lock(mutex_);
  const auto derivatives =
      std::ranges::find(derivatives_, id, &Derivatives::task);
  if (derivatives != derivatives_.end()) derivatives_.erase(derivatives);
  const auto kind = remove_task(id);
  if (!kind || listener_ == nullptr) return;
  if (averaging_ == id) {
    averaging_ = kNoTask;
    waiting_.clear();
    listener_->backward_given_up();
  }
  if (*kind != Kind::foreign && --entered_ == 0) listener_->graph_left();
}

std::vector<bool> BackwardTracker::reachable() const {
  const std::lock_guard lock(mutex_);
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  std::vector<bool> reached(watched_.size());
  bool all = true;
  for (size_t i = 0; i < watched_.size(); ++i) {
    reached[i] = nodes->contains(watched_[i].accumulator.get());
    all &= reached[i];
  }
  if (all) return reached;
  // A graph that was made before a change of dtype holds other accumulators.
  std::unordered_set<const c10::TensorImpl*> tensors;
  for (auto* node : *nodes) {
    if (node->sequence_nr() != kNoSequenceNumber) continue;
    if (const auto* accumulate =
            dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      tensors.insert(accumulate->variable.unsafeGetTensorImpl());
    }
  }
  for (size_t i = 0; i < watched_.size(); ++i) {
    reached[i] = tensors.contains(watched_[i].tensor.unsafeGetTensorImpl());
  }
  return reached;
}

}  // namespace lockstep::internal
