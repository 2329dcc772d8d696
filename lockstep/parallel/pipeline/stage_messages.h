#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "lockstep/comm/point_to_point.h"
#include "lockstep/comm/process_group.h"

namespace lockstep::internal {

// The contents of the first message between two stages, about those that
// follow.
struct TensorDescription {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  bool requires_grad;
  bool operator==(const TensorDescription&) const = default;
};
using Descriptions = std::vector<TensorDescription>;
Descriptions describe(const std::vector<at::Tensor>& tensors);
std::string to_string(const Descriptions& descriptions);

// Tensors that are under way to this rank.
struct Arriving {
  std::vector<at::Tensor> tensors{};
  std::vector<WorkPtr> works{};
  // For gradients: one number for each, 0 if nothing has used the tensor.
  at::Tensor used{};
  // Blocks until all have arrived. What is not used is undefined.
  std::vector<at::Tensor> wait();
};

// The messages between the stages of a pipeline, seen from one rank. A message
// has a tag of its own for each stage that sends, micro-batch and direction;
// its tensors follow each other. Use from one thread. Errors are those of
// point_to_point.h.
class StageMessages {
 public:
  StageMessages(ProcessGroupPtr group, int micro_batches);

  // Which shapes the activations between two stages have is told once for each
  // `shapes`, a number for the shapes of the pipeline's inputs.
  struct Place {
    int stage;  // that sends
    int micro_batch;
    int peer;  // of the group
    int64_t shapes;
  };

  // Sends activations; before them, once, what they are. Throws
  // std::runtime_error if that has changed.
  void send_forward(const Place& place, const std::vector<at::Tensor>& tensors);
  // Begins to receive them on `device`; the first time blocks until their
  // description has come.
  Arriving recv_forward(const Place& place, at::Device device);

  // Sends the gradients of `inputs`, undefined if nothing has used the input,
  // and before them which those are; receives gradients for `outputs`.
  void send_backward(const Place& place, const std::vector<at::Tensor>& inputs,
                     const std::vector<at::Tensor>& gradients);
  Arriving recv_backward(const Place& place,
                         const std::vector<at::Tensor>& outputs);

  // Whether the received tensors require grad.
  const Descriptions& known(const Place& place) const;

  // Waits for sends, but for the last `left`.
  void finish_sends(size_t left = 0);

 private:
  int tag_of(const Place& place, bool backward) const;
  void post(const at::Tensor& tensor, const Place& place, int tag);

  ProcessGroupPtr group_;
  int micro_batches_;
  // The key is the stage that sends and the number of the shapes.
  std::map<std::pair<int, int64_t>, Descriptions> known_;
  std::deque<std::pair<WorkPtr, at::Tensor>> sends_;
};

// Returns what a stage's forward is called with in place of `inputs`: aliases,
// tensors of the same memory whose gradients go to `inputs`. What the stage
// before has sent are leaves here, which may not be changed in place while they
// require grad, but in one process they are results of the layer before, which
// may be: so may the aliases. Nor are these views, as the parts of a batch are.
// Where grad mode is off, they have no history.
std::vector<at::Tensor> stage_inputs(const std::vector<at::Tensor>& inputs);

// Call it after forward: tells autograd which inputs forward has changed in
// place, so that a backward that needs the old values throws, as in one
// process.
void report_changes(const std::vector<at::Tensor>& inputs,
                    const std::vector<at::Tensor>& aliases);

}  // namespace lockstep::internal
