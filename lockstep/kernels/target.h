#pragma once

#include <cstdint>
#include <string>
#include <vector>

// Which instruction sets the kernels were compiled for, and which one runs.
namespace lockstep::internal::kernels {

// Returns the instruction sets that this machine can run, the best first, by
// Highway's names: "AVX3" (AVX-512), "AVX2", "SSE4", "SCALAR" (no vectors, the
// plain loops). While a ForcedTarget lives, only the forced one.
std::vector<std::string> supported_targets();

// Makes every kernel of the process use one target while it lives: for tests
// and measurements. Must not be nested, and no kernel may run in another thread
// while it is made or destroyed. Throws std::invalid_argument if `name` is not
// one of supported_targets().
class [[nodiscard]] ForcedTarget {
 public:
  explicit ForcedTarget(const std::string& name);
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;
  ~ForcedTarget();
};

}  // namespace lockstep::internal::kernels
