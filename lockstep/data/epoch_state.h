#pragma once

#include <cstdint>
#include <map>
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

}  // namespace lockstep::internal
