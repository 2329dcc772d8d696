#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/data/epoch_order.h"
#include "lockstep/data/sampler.h"

namespace lockstep {

// The base of Lockstep's samplers. Each epoch is one *global order* of samples,
// which a generator seeded with `seed + epoch` draws; the class of the sampler
// says how. Rank r of R visits places r, r + R, ... of it.
//
// Position. The sampler knows how far the training loop has come in its epoch.
// Batches that the loop has received count, including the batch that it is
// working on; batches that the loader only fetched ahead do not. So a state
// that is taken in the loop's body after the optimizer's step continues with
// the next batch, and repeats or skips nothing. The position counts places of
// the global order: it is the same number on all ranks that have made the same
// number of steps, so the state of rank 0 serves all of them, and another
// number of ranks may share the rest of the epoch.
//
// At the end of a pass everything that drop_last leaves out (the sampler's or
// the loader's) counts as consumed. So a state that is taken after the last
// batch, or in a pass without any, has nothing left, whatever number of ranks
// loads it.
class ResumableSampler : public Sampler {
 public:
  // Selects the order of the next pass. Do not call it while a loop runs. A new
  // epoch starts at its beginning; if `epoch` is the current epoch, a loaded
  // position is kept.
  void set_epoch(int64_t epoch) { state_.set_epoch(epoch); }

  // Returns the epoch of the pass that began last, or the one that was selected
  // or loaded since.
  int64_t epoch() const { return state_.epoch(); }

  // Returns this rank's indices of the whole epoch: what iterating Python's
  // sampler yields.
  std::vector<size_t> indices() const;

  // Returns this rank's indices from the loaded position on, if
  // load_state_dict() was called since the last pass; otherwise those of the
  // whole epoch.
  std::vector<size_t> begin_pass() override;
  void consumed(int64_t count) override;
  void rest_left_out() override;
  PassPlaces places() const override;

  // Returns the number of this rank's samples in a whole epoch: Python's len().
  // Equal on all ranks unless they share an epoch without padding.
  int64_t size() const override;
  int64_t dataset_size() const override { return order_->dataset_size; }
  int64_t num_replicas() const { return share_.num_replicas; }
  int64_t rank() const { return share_.rank; }

  // Returns how many samples of the epoch all ranks together have consumed,
  // padding included. 0 before the first batch.
  int64_t position() const { return state_.position(); }

  // Returns the entries epoch, seed, position and dataset_size, and what else
  // the order depends on.
  std::map<std::string, int64_t> state_dict() const;

  // Returns the state with which another sampler begins the pass that this one
  // would begin now. After a pass it is not state_dict(): unless a state was
  // loaded since, the next pass begins at its beginning.
  std::map<std::string, int64_t> next_pass_state() const;

  // Takes over epoch, seed and position: the next pass begins at the first
  // sample that was not consumed, and is empty if all were. This sampler keeps
  // its own options for everything that the state does not hold; with the same
  // number of ranks and drop_last the rest of the epoch is exactly that of an
  // uninterrupted run. Another number of ranks splits the remaining samples
  // anew; all ranks together still visit them in the same order.
  //
  // An empty state, which a snapshot between two epochs holds, changes nothing:
  // the next epoch begins at its beginning.
  //
  // Throws std::invalid_argument, and changes nothing, if an entry is missing
  // or out of range, or if the state was saved for another dataset size or
  // another order. Do not call it while a loop runs.
  void load_state_dict(const std::map<std::string, int64_t>& state);

 protected:
  // `name`: that of the class, for errors.
  ResumableSampler(const char* name, int64_t seed, internal::EpochOrder order,
                   const internal::Share& share = {});

 private:
  // Begins a pass in `state`; returns its position.
  int64_t begin(internal::EpochState& state) const;
  int64_t end_from(int64_t start) const;
  std::vector<size_t> indices_from(int64_t start) const;

  std::shared_ptr<const internal::EpochOrder> order_;
  internal::Share share_;
  internal::EpochState state_;
  int64_t pass_begin_ = 0;
  // The place in the order at which the current pass ends.
  int64_t pass_end_ = 0;
};

}  // namespace lockstep
