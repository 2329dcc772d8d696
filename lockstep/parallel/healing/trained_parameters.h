#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/training_state.h"

namespace lockstep::internal {

// The parameters of a TrainingState's modules, and what the functions of a
// HealedTraining do with them and their gradients. It knows by the versions
// that LibTorch counts, and by some elements of each parameter on the CPU, what
// was written to: torch::optim::SGD changes no version. For one thread.
//
// A gradient is *kept* if the last update has not changed its parameter: the
// program may add to it in the next step.
class TrainedParameters {
 public:
  explicit TrainedParameters(const TrainingState& state);

  // A tensor as it is before a function.
  struct Mark {
    uint32_t version = 0;
    uint64_t sample = 0;
    bool operator==(const Mark&) const = default;
  };
  using Marks = std::vector<Mark>;
  static Marks marks_of(const std::vector<at::Tensor>& tensors);
  Marks marks() const { return marks_of(all_); }

  // Throws std::logic_error, which names a parameter, if `compute` has changed
  // one. `before`: marks() before it.
  void require_unchanged(const Marks& before) const;

  // Enclose an update. The second one warns once if it has changed a parameter
  // with a gradient that no optimizer of `state` has.
  void update_begins();
  void update_has_ended();

  // Enclose a function that was given alone. The second one throws
  // std::logic_error if the function has left other parameters or gradients.
  void function_begins();
  void require_same_state() const;

  // A character for each parameter, "1" if its gradient is kept; empty if none
  // is.
  const std::string& kept() const { return kept_; }
  // Whether a kept gradient has another form than its parameter (sparse,
  // another dtype), so that records leave it out.
  bool keeps_unrecorded() const { return keeps_unrecorded_; }

  // The gradients that records need, which are those that were kept in one of
  // the last steps: a step that ends without an update is not known before.
  // `marks`: a character for each parameter, "1" if its gradient is among them.
  std::vector<at::Tensor> gradients_to_record(std::string& marks) const;

  size_t count() const { return all_.size(); }
  // Whether all of `parameters` are among them.
  bool have(const std::vector<at::Tensor>& parameters) const;
  // Returns how much memory gradients with these marks take.
  size_t bytes_of(const std::string& marks) const;

  // Drops all gradients, and loads those that are `kept`; of the parameters
  // with a mark, in this order, `take` returns what was recorded for a tensor
  // of this kind. Returns whether all that are kept were recorded.
  bool load_gradients(
      const std::string& kept, const std::string& marks,
      const std::function<at::Tensor(const at::Tensor& like)>& take);
  // Gives the parameters the gradients that were loaded, once the wrappers have
  // renewed theirs.
  void set_loaded_gradients();

 private:
  std::string name_of(size_t index) const;
  bool is_recordable(size_t index) const;
  bool has_optimizer(size_t index) const;
  void warn_without_optimizer(size_t index);

  const TrainingState& state_;
  std::vector<at::Tensor> all_{};
  std::string kept_{};
  std::vector<int> recorded_for_{};  // so many more updates
  bool keeps_unrecorded_ = false;
  std::vector<at::Tensor> loaded_{};  // undefined ones for all others
  // As of update_begins() or function_begins(), until the other call.
  Marks marks_before_{};
  std::vector<bool> had_gradient_{};
  std::vector<uint64_t> gradients_before_{};  // their samples
  std::vector<bool> checked_{};  // whether an optimizer has the parameter
  bool warned_ = false;
};

}  // namespace lockstep::internal
