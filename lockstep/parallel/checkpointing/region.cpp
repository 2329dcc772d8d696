#include "lockstep/parallel/checkpointing/region.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

namespace lockstep::internal {
namespace {

// LibTorch's number of no backward pass.
constexpr int kNoTask = -1;

// Ends the function when its recomputation has saved what is needed. The engine
// passes on only what derives from std::exception, and the function may run a
// backward pass.
class RecomputationStop : public std::exception {
 public:
  explicit RecomputationStop(const void* recomputation)
      : recomputation_(recomputation) {}
  const void* recomputation() const { return recomputation_; }
  const char* what() const noexcept override {
    return "checkpoint: the recomputation has all that it needs (a function "
           "that catches this must set early_stop to false)";
  }

 private:
  const void* recomputation_;
};

[[noreturn]] void throw_difference(const std::string& difference) {
  throw CheckpointError(
      "checkpoint: a recomputation differs from its forward: " + difference +
      "; what the function computes may depend only on its arguments, on "
      "parameters that stay the same until backward, and on the default "
      "generators (preserve_rng_state)");
}

}  // namespace

// The place of one saved tensor, which the graph's node holds. Guarded by its
// region.
class Region::Slot {
 public:
  struct Value {
    int task;
    at::Tensor tensor;
    int64_t version;
  };

  explicit Slot(size_t index) : index_(index) {}
  size_t index() const { return index_; }

  void put(int task, const at::Tensor& tensor) {
    drop(task);
    // Detached, or the recomputed graph would live as long as this tensor. The
    // alias has the same version counter.
    values_.push_back({task, tensor.detach(), tensor._version()});
  }
  std::optional<Value> take(int task) {
    const auto found = std::ranges::find(values_, task, &Value::task);
    if (found == values_.end()) return std::nullopt;
    auto value = std::move(*found);
    values_.erase(found);
    return value;
  }
  void drop(int task) {
    std::erase_if(values_,
                  [&](const Value& each) { return each.task == task; });
  }

 private:
  const size_t index_;
  std::vector<Value> values_;
};

class Region::SlotHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit SlotHooks(std::shared_ptr<Region> region)
      : region_(std::move(region)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    slot_ = region_->add(tensor);
  }
  at::Tensor call_unpack_hook() override { return region_->take(*slot_); }

 private:
  const std::shared_ptr<Region> region_;
  std::shared_ptr<Slot> slot_;
};

// Sees the tensors that a recomputation saves, and fills the slots with them.
class Region::Recomputation final : public SavedTensors {
 public:
  // `only`: the one slot to fill; null for all.
  Recomputation(Region& region, int task, const Slot* only)
      : region_(region),
        task_(task),
        only_(only),
        count_(region.saved_.size()) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<Hooks>(*this);
  }

  void require_complete() const {
    if (has_stopped_ || next_ >= count_) return;
    throw_difference("autograd saved " + std::to_string(count_) +
                     " tensors in forward and only " + std::to_string(next_) +
                     " in the recomputation");
  }

 private:
  // The function may run a backward pass over the recomputed graph, so its
  // nodes have their tensors.
  class Hooks final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Hooks(Recomputation& recomputation)
        : recomputation_(recomputation) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      tensor_ = tensor.detach();
      recomputation_.saves(tensor);
    }
    at::Tensor call_unpack_hook() override { return tensor_; }

   private:
    Recomputation& recomputation_;  // only while the tensor is saved
    at::Tensor tensor_;
  };

  void saves(const at::Tensor& tensor) {
    if (has_stopped_) return;  // the function has caught the exception
    const size_t index = next_++;
    if (index >= count_) {
      // Before the end of forward (grad() in the function) the rest of the
      // function has not saved anything yet.
      if (!region_.has_ended_) return;
      throw_difference("autograd saved " + std::to_string(count_) +
                       " tensors in forward and more in the recomputation");
    }
    const auto& saved = region_.saved_[index];
    if (region_.options_.determinism_check == DeterminismCheck::metadata) {
      if (const Metadata now(tensor); now != saved.metadata) {
        throw_difference("tensor " + std::to_string(index + 1) + " of the " +
                         std::to_string(count_) +
                         " that autograd saves in it was " +
                         saved.metadata.text() + " and is now " + now.text());
      }
    }
    const auto slot = saved.slot.lock();
    const bool is_wanted = slot != nullptr && (!only_ || slot.get() == only_);
    if (is_wanted) slot->put(task_, tensor);
    if (!region_.options_.early_stop) return;
    if (index + 1 == count_ || (only_ != nullptr && is_wanted)) {
      has_stopped_ = true;
      throw RecomputationStop(this);
    }
  }

  Region& region_;
  const int task_;
  const Slot* const only_;
  const size_t count_;
  size_t next_ = 0;
  bool has_stopped_ = false;
};

// Held by a backward pass; its end, by success or failure, destroys it.
class Region::DropAtEnd {
 public:
  DropAtEnd(std::weak_ptr<Region> region, int task)
      : region_(std::move(region)), task_(task) {}
  DropAtEnd(const DropAtEnd&) = delete;
  DropAtEnd& operator=(const DropAtEnd&) = delete;
  ~DropAtEnd() {
    if (const auto region = region_.lock()) region->drop(task_);
  }

 private:
  const std::weak_ptr<Region> region_;
  const int task_;
};

Region::Metadata::Metadata(const at::Tensor& tensor)
    : dtype(tensor.scalar_type()), device(tensor.device()) {
  // A nested tensor has no sizes.
  if (!tensor.is_nested()) sizes = tensor.sizes().vec();
}

std::string Region::Metadata::text() const {
  std::ostringstream text;
  text << dtype << at::IntArrayRef(sizes) << " on " << device;
  return text.str();
}

Region::Region(const CheckpointOptions& options,
               std::unique_ptr<CheckpointedCall> call,
               const std::vector<at::Tensor>& inputs)
    : options_(options),
      call_(std::move(call)),
      conditions_(inputs, options.preserve_rng_state),
      versions_(inputs) {
  inputs_.reserve(inputs.size());
  for (const auto& input : inputs) {
    inputs_.emplace_back(input, /*is_output=*/false);
  }
}

std::shared_ptr<Region> Region::make(const CheckpointOptions& options,
                                     std::unique_ptr<CheckpointedCall> call,
                                     const std::vector<at::Tensor>& inputs) {
  return std::shared_ptr<Region>(new Region(options, std::move(call), inputs));
}

void Region::forward(const std::function<void()>& first,
                     const std::vector<at::Tensor>& inputs) {
  {
    const Scope recorded(*this);
    first();
  }
  const std::lock_guard lock(mutex_);
  has_ended_ = true;
  versions_.require_unchanged(inputs);
}

std::unique_ptr<torch::autograd::SavedVariableHooks> Region::make_hooks() {
  return std::make_unique<SlotHooks>(shared_from_this());
}

std::shared_ptr<Region::Slot> Region::add(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  auto slot = std::make_shared<Slot>(saved_.size());
  saved_.push_back({slot, Metadata(tensor)});
  return slot;
}

at::Tensor Region::take(Slot& slot) {
  const int task = torch::autograd::get_current_graph_task_id();
  const std::lock_guard lock(mutex_);
  auto value = slot.take(task);
  if (!value) {
    const bool first = task != kNoTask && tasks_.insert(task).second;
    if (first) {
      torch::autograd::Engine::get_default_engine().queue_callback(
          [mark = std::make_shared<DropAtEnd>(weak_from_this(), task)] {});
    }
    // If the pass has recomputed the region before, a node asks for its tensor
    // a second time.
    recompute(task, first ? nullptr : &slot);
    value = slot.take(task);
  }
  if (!value) throw_difference("a tensor of forward was not saved again");
  if (value->tensor._version() != value->version) {
    throw CheckpointError(
        "checkpoint: tensor " + std::to_string(slot.index() + 1) + " of the " +
        std::to_string(saved_.size()) +
        " that autograd saves in a region is needed for backward and was "
        "changed in place afterwards; use the operation that is not in place");
  }
  return std::move(value->tensor);
}

void Region::recompute(int task, const Slot* only) {
  std::vector<at::Tensor> inputs;
  inputs.reserve(inputs_.size());
  for (const auto& input : inputs_) inputs.push_back(input.unpack());
  Recomputation recomputation(*this, task, only);
  {
    const at::AutoGradMode with_graph(true);
    const ForwardConditions::Restored restored(conditions_);
    const Scope scope(recomputation);
    try {
      call_->again(std::move(inputs));
    } catch (const RecomputationStop& stop) {
      if (stop.recomputation() != &recomputation) throw;
    }
  }
  recomputation.require_complete();
}

void Region::drop(int task) {
  const std::lock_guard lock(mutex_);
  for (const auto& saved : saved_) {
    if (const auto slot = saved.slot.lock()) slot->drop(task);
  }
  tasks_.erase(task);
}

void recorded_checkpoint(const CheckpointOptions& options,
                         std::unique_ptr<CheckpointedCall> call,
                         const std::function<void()>& first,
                         const std::vector<at::Tensor>& inputs) {
  Region::make(options, std::move(call), inputs)->forward(first, inputs);
}

}  // namespace lockstep::internal
