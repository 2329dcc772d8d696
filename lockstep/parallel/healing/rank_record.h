#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/parallel/healing/place_record.h"
#include "lockstep/parallel/healing/trained_parameters.h"

namespace lockstep::internal {

// The state that each rank of a HealedTraining has of its own, though the
// training is replicated: generators, buffers, gradients that are kept, and
// the flags of wrappers (reconfigure.h). It lies in the memory of the rank's
// place, as it was after the last steps. For one thread.
class RankRecord {
 public:
  // When a record was made: as a step begins, or after it was computed and
  // before its update.
  enum class Moment : int64_t { begun, computed };

  // One slot of the memory is being written while the other two are whole.
  static constexpr size_t kSlots = 3;

  // Uses the first kSlots slots of the memory (place_record.h). All references
  // must outlive this object.
  RankRecord(const FileDescriptor& memory, const TrainingState& state,
             TrainedParameters& parameters);

  // Copies the state as it is after `steps` steps; with Moment::computed, but
  // for what the last update changes. `calls`: how many calls of run() this
  // rank has completed. Throws what PlaceRecord::write() throws.
  void write(int64_t steps, int64_t calls, Moment moment);

  // The generators and the buffers, to see whether a function changes them.
  struct Mark {
    at::Tensor generators{};
    TrainedParameters::Marks buffers{};  // of the model
    TrainedParameters::Marks of_items{};
  };
  Mark mark() const;
  bool differs_from(const Mark& mark) const;
  // Returns a character for each buffer of the items, "1" if it has changed.
  std::string changed_items(const Mark& mark) const;

  PlaceRecord& records() { return record_; }
  bool is_empty() const { return record_.steps().empty(); }

  // Returns whether there is a record of the state after `steps` steps.
  bool has(int64_t steps) { return record_.read(steps).has_value(); }

  // Gives the training the recorded state, but for the wrappers
  // (restore_wrappers()) and the gradients
  // (TrainedParameters::set_loaded_gradients()), which their renewal would
  // change. `kept`: the gradients that the rank keeps from which all else came
  // (TrainedParameters::kept()); nothing if the record says it. `updated`:
  // changed_items() of that rank's last update, whose results are for all
  // ranks; nothing if this rank has its own. Returns whether there is a record.
  // Throws std::runtime_error if the process before had another module, or
  // gradients are kept that were not recorded.
  bool read(int64_t steps, const std::optional<std::string>& kept,
            const std::optional<std::string>& updated);
  void restore_wrappers() const;
  // Whether what read() has found was made after the last update, and how many
  // calls were completed then.
  bool is_after_update() const { return moment_ == Moment::begun; }
  int64_t calls() const { return calls_; }

  // Gives the ranks the buffers and generators that load_snapshot() gives to
  // another number of ranks than has saved: the buffers of the first rank, and
  // generators that are seeded from that rank's. Collective. `failure`: why
  // this rank has no state; set if it gets none.
  void take_first(int64_t steps, int64_t calls, std::exception_ptr& failure);

 private:
  std::vector<at::Tensor> buffers() const;
  void load_gradients(
      int64_t steps, const std::string& kept, const std::string& marks,
      const std::function<at::Tensor(const at::Tensor& like)>& take);

  const TrainingState& state_;
  TrainedParameters& parameters_;
  PlaceRecord record_;
  // As read() has found them.
  std::string wrappers_{};
  Moment moment_ = Moment::begun;
  int64_t calls_ = 0;
};

}  // namespace lockstep::internal
