#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel/checkpointing/checkpoint_options.h"
#include "lockstep/parallel/checkpointing/checkpointed_call.h"
#include "lockstep/parallel/checkpointing/forward_conditions.h"
#include "lockstep/parallel/checkpointing/saved_tensors.h"

namespace lockstep::internal {

// One call of checkpoint().
//
// In forward, autograd records the call as usual, but instead of each tensor
// that an operation saves it keeps an empty slot with a number (SavedTensors).
// When backward first needs the tensor of a slot, the call is made again; the
// tensors that it saves, in the same order, fill the slots. The graph of this
// second call is thrown away: gradients go through the first one, so that
// hooks see what they see without checkpointing. A slot gives its tensor away
// when backward asks for it. Another backward pass (retain_graph) makes the
// call again for itself. What a backward pass leaves in slots is dropped when
// it ends.
//
// Regions nest: the inputs of an inner region are saved in the outer one. To
// recompute the inner region, backward therefore recomputes the outer one
// first.
//
// Threads: forward and backward may run in different ones, and backward in
// several (one per device): the first to need a tensor recomputes, the others
// wait.
class Region final : public SavedTensors,
                     public std::enable_shared_from_this<Region> {
 public:
  // `inputs`: the tensors of the call's arguments.
  static std::shared_ptr<Region> make(const CheckpointOptions& options,
                                      std::unique_ptr<CheckpointedCall> call,
                                      const std::vector<at::Tensor>& inputs);

  // Runs `first`, which makes the call. `inputs`: as in make(). Throws
  // std::invalid_argument if it has changed one of them in place.
  void forward(const std::function<void()>& first,
               const std::vector<at::Tensor>& inputs);

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;

 private:
  class Slot;
  class SlotHooks;
  class Recomputation;
  class DropAtEnd;

  struct Metadata {
    explicit Metadata(const at::Tensor& tensor);
    bool operator==(const Metadata&) const = default;
    std::string text() const;

    std::vector<int64_t> sizes;
    c10::ScalarType dtype;
    c10::Device device;
  };
  // A tensor that forward has saved. The slot ends with the graph's node.
  struct Saved {
    std::weak_ptr<Slot> slot;
    Metadata metadata;
  };

  Region(const CheckpointOptions& options,
         std::unique_ptr<CheckpointedCall> call,
         const std::vector<at::Tensor>& inputs);

  std::shared_ptr<Slot> add(const at::Tensor& tensor);
  at::Tensor take(Slot& slot);
  void recompute(int task, const Slot* only);
  void drop(int task);

  const CheckpointOptions options_;
  const std::unique_ptr<CheckpointedCall> call_;
  const ForwardConditions conditions_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  const InputVersions versions_;  // before forward

  // Guards all below. Recursive, because a recomputation may run a backward
  // pass (grad() in the function).
  std::recursive_mutex mutex_;
  std::vector<Saved> saved_;
  bool has_ended_ = false;
  // The backward passes that have recomputed the region.
  std::set<int> tasks_;
};

}  // namespace lockstep::internal
