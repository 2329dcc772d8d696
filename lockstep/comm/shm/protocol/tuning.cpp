#include "lockstep/comm/shm/protocol/tuning.h"

#include <stdexcept>
#include <string>

namespace lockstep::shm {
namespace {

constexpr size_t kKiB = 1024;
constexpr size_t kMiB = 1024 * kKiB;
// Segments of 64 ranks stay within 17 GiB, and sums of sizes within 64 bits.
constexpr size_t kMost = 64 * kMiB;

void check_size(const char* name, size_t bytes, size_t multiple) {
  if (bytes >= multiple && bytes <= kMost && bytes % multiple == 0) return;
  throw std::invalid_argument(
      std::string(name) + " is " + std::to_string(bytes) +
      "; it must be a multiple of " + std::to_string(multiple) + ", from " +
      std::to_string(multiple) + " to " + std::to_string(kMost));
}

}  // namespace

Tuning default_tuning(int ranks) {
  const size_t one_shot = ranks <= 8 ? 32 : 16;
  const size_t chunk = ranks <= 2   ? 1024
                       : ranks <= 4 ? 512
                       : ranks <= 8 ? 256
                                    : 128;
  return {.one_shot_bytes = one_shot * kKiB,
          .chunk_bytes = chunk * kKiB,
          .streaming_bytes = 32 * kMiB};
}

void check(const Tuning& tuning) {
  check_size("one_shot_bytes", tuning.one_shot_bytes, 64);
  check_size("chunk_bytes", tuning.chunk_bytes, 4096);
}

}  // namespace lockstep::shm
