#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/sampler.h"

namespace lockstep::internal {

// How far a sampler has come: epoch, seed and position, what a pass does with
// them, and the state dict that holds them.
class EpochState {
 public:
  // An entry of the state dict that must be the same in the sampler that saved
  // the state and in the one that loads it.
  struct Fixed {
    enum class Kind {
      number,  // an error prints it
      flag,    // likewise, as true or false
      digest,  // of something that no error can print
    };
    std::string name;
    int64_t value = 0;
    Kind kind = Kind::number;
  };

  // `sampler` is the name of the class, for errors.
  EpochState(std::string sampler, int64_t seed)
      : sampler_(std::move(sampler)), seed_(seed) {}

  int64_t epoch() const { return epoch_; }
  int64_t position() const { return position_; }

  // Returns whether the next pass begins at a loaded position.
  bool resumes() const { return resume_; }

  // Returns what seeds the generator of this epoch: seed + epoch. Unsigned, so
  // that it wraps instead of overflowing; Python, too, hands a negative seed to
  // the generator modulo 2^64.
  uint64_t generator_seed() const {
    return static_cast<uint64_t>(seed_) + static_cast<uint64_t>(epoch_);
  }

  // Selects the epoch of the next pass. Another epoch begins at its beginning;
  // the current epoch keeps a loaded position.
  void set_epoch(int64_t epoch);

  // Begins a pass: at the loaded position if there is one, else at 0. Returns
  // that position.
  int64_t begin_pass();

  // Begins the next epoch, unless the current one was not begun yet.
  void advance_if_begun();

  void move_to(int64_t position) { position_ = position; }

  // Returns epoch, seed, position and the entries in `fixed`.
  std::map<std::string, int64_t> state_dict(
      const std::vector<Fixed>& fixed) const;

  // Takes over epoch, seed and position. Throws std::invalid_argument, and
  // changes nothing, if an entry is missing, if one of `fixed` has another
  // value, or if the position is outside [0, highest]. An empty state changes
  // nothing.
  void load_state_dict(const std::map<std::string, int64_t>& state,
                       const std::vector<Fixed>& fixed, int64_t highest);

  // Returns this entry of the state. Throws std::invalid_argument if there is
  // none.
  int64_t entry(const std::map<std::string, int64_t>& state,
                const std::string& name) const;

 private:
  void require_same(const Fixed& fixed, int64_t saved) const;

  std::string sampler_;
  int64_t seed_;
  int64_t epoch_ = 0;
  int64_t position_ = 0;
  bool resume_ = false;  // the next pass begins at position_
  bool begun_ = false;   // a pass of this epoch has begun
};

// Which part of each epoch this process takes.
struct Share {
  int64_t num_replicas = 1;
  int64_t rank = 0;
  bool drop_last = false;
  bool pad = true;
};

// Returns the share of the rank, for a sampler with this name: none means world
// size and rank of the default process group, or 1 and 0 in a process that was
// started alone. Throws std::invalid_argument if they are out of range, or if a
// default is wanted in a process that was launched as one of several but has no
// group yet.
Share share_of_rank(const char* sampler, std::optional<int64_t> num_replicas,
                    std::optional<int64_t> rank, bool drop_last, bool pad);

// Return the number that they are given. Throw std::invalid_argument, with the
// sampler's name, if a dataset's size is negative, or if a number of samples is
// not 1 or more.
int64_t checked_size(const char* sampler, int64_t dataset_size);
int64_t checked_samples(const char* sampler, int64_t num_samples);

// The base of Lockstep's samplers. Each epoch is one *global order* of samples,
// which a generator seeded with `seed + epoch` draws; a derived class says how.
// Rank r of R visits places r, r + R, ... of it.
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
  int64_t dataset_size() const override { return dataset_size_; }
  int64_t num_replicas() const { return share_.num_replicas; }
  int64_t rank() const { return share_.rank; }

  // Returns how many samples of the epoch all ranks together have consumed,
  // padding included. 0 before the first batch.
  int64_t position() const { return state_.position(); }

  // Returns the entries epoch, seed, position and dataset_size, and what else
  // the order depends on.
  std::map<std::string, int64_t> state_dict() const {
    return state_.state_dict(fixed_entries());
  }

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
  // Whether a pass has the order of the epoch that set_epoch() or a state has
  // selected (the ranks of a group must agree on one), or begins the next epoch
  // if that one was begun already.
  enum class NextPass { same_epoch, next_epoch };

  // `length`: the number of places in an epoch. Requires `length` and
  // `dataset_size` >= 0.
  ResumableSampler(const char* name, int64_t length, int64_t dataset_size,
                   int64_t seed, Share share, NextPass next_pass);

  // Returns the order of an epoch: `length` indices, int64 on the CPU. A tensor
  // that is not defined means 0, 1, 2, ...
  virtual at::Tensor order(uint64_t generator_seed) const = 0;

  // Returns what else the order depends on.
  virtual std::vector<EpochState::Fixed> order_entries() const { return {}; }

 private:
  std::vector<EpochState::Fixed> fixed_entries() const;
  int64_t end_from(int64_t start) const;
  std::vector<size_t> indices_from(int64_t start) const;

  int64_t length_;
  int64_t dataset_size_;
  Share share_;
  NextPass next_pass_;
  EpochState state_;
  int64_t pass_begin_ = 0;
  // The place in the order at which the current pass ends.
  int64_t pass_end_ = 0;
};

// Returns a random order of 0, 1, ..., size - 1: Python's randperm() with a
// generator seeded so.
at::Tensor random_order(int64_t size, uint64_t generator_seed);

}  // namespace lockstep::internal
