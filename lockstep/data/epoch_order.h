#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

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
  // Whether these were world size and rank of the default process group.
  bool is_of_world = false;

  // Takes the group's numbers if it goes on with fewer ranks (reconfigure.h).
  // At the beginning of a pass.
  void follow_world();
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

// The orders of all epochs of a sampler.
struct EpochOrder {
  // Whether a pass has the order of the epoch that set_epoch() or a state has
  // selected (the ranks of a group must agree on one), or begins the next epoch
  // if that one was begun already.
  enum class NextPass { same_epoch, next_epoch };

  int64_t length = 0;  // the number of places in an epoch, 0 or more
  int64_t dataset_size = 0;
  NextPass next_pass = NextPass::next_epoch;
  // Returns `length` indices, int64 on the CPU. If it is null they are 0, 1, 2,
  // ...
  std::function<at::Tensor(uint64_t generator_seed)> draw{};
  // The other numbers that the order depends on.
  std::vector<EpochState::Fixed> entries{};
};

// Returns a random order of 0, 1, ..., size - 1: Python's randperm() with a
// generator seeded so.
at::Tensor random_order(int64_t size, uint64_t generator_seed);

// Returns the order that torch.multinomial draws with these weights. Keeps a
// copy of them, as float64 on the CPU. Throws std::invalid_argument, with the
// name of the sampler, unless they are one dimension of finite numbers >= 0
// with one above 0; if there are more than 2^24 (torch.multinomial takes no
// more); if `num_samples` is not 1 or more; or if there is no replacement and
// fewer weights are above 0 than samples are drawn.
EpochOrder weighted_order(const char* sampler, const at::Tensor& weights,
                          int64_t num_samples, bool replacement);

// Returns float64 weights on the CPU.
at::Tensor weights_tensor(const std::vector<double>& weights);

}  // namespace lockstep::internal
