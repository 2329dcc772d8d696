#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::internal::fuzz {

// Random numbers that are the same on every machine: SplitMix64 (Steele et al.,
// "Fast splittable pseudorandom number generators", OOPSLA 2014).
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  // Returns a number in [0, count).
  size_t below(size_t count) { return next() % count; }
  bool percent(size_t chance) { return below(100) < chance; }
  template <class T>
  const T& one_of(const std::vector<T>& values) {
    return values[below(values.size())];
  }

 private:
  uint64_t state_;
};

}  // namespace lockstep::internal::fuzz
