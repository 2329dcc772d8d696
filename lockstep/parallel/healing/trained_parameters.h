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
// that LibTorch counts what was written to. For one thread.
//
// A gradient is *kept* if the last update has not changed its parameter: the
// program may add to it in the next step.
class TrainedParameters {
 public:
  explicit TrainedParameters(const TrainingState& state);

  using Versions = std::vector<uint32_t>;
  Versions versions() const;

  // Throws std::logic_error, which names a parameter, if `compute` has changed
  // one, or has begun with the versions `before`.
  void require_unchanged(const Versions& before) const;

  // Enclose an update. The second one warns once if it has changed a parameter
  // with a gradient that no optimizer of `state` has.
  void update_begins();
  void update_has_ended();

  // Returns all gradients; of parameters that have none, undefined tensors.
  std::vector<at::Tensor> gradients() const;
  // Throws std::logic_error if a function that was given alone has made or
  // changed gradients. `before`: gradients() and their versions before it.
  void require_same_gradients(const std::vector<at::Tensor>& before,
                              const Versions& versions_before) const;
  static Versions versions_of(const std::vector<at::Tensor>& gradients);

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
  Versions before_update_{};
  std::vector<bool> had_gradient_{};
  std::vector<bool> checked_{};  // whether an optimizer has the parameter
  bool warned_ = false;
};

}  // namespace lockstep::internal
