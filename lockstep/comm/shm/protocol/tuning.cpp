#include "lockstep/comm/shm/protocol/tuning.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "lockstep/base/environment.h"

namespace lockstep::internal::shm {
namespace {

constexpr const char* kVariable = "LOCKSTEP_TUNING";
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

size_t reported(int name, size_t otherwise) {
  const long bytes = ::sysconf(name);
  return bytes > 0 ? static_cast<size_t>(bytes) : otherwise;
}

}  // namespace

CacheSizes cache_sizes() {
  return {.level1 = reported(_SC_LEVEL1_DCACHE_SIZE, 32 * kKiB),
          .level2 = reported(_SC_LEVEL2_CACHE_SIZE, kMiB),
          .last = reported(_SC_LEVEL3_CACHE_SIZE, 32 * kMiB)};
}

Tuning default_tuning(int ranks, const CacheSizes& caches) {
  // Every rank reads the contributions of all others: many would not stay in
  // the nearest cache beside each other.
  const size_t nearest = std::bit_floor(caches.level1);
  const size_t one_shot = ranks <= 8 ? nearest : nearest / 2;
  // The chunks of all ranks are in use at once.
  const size_t share =
      std::bit_floor(caches.level2 / static_cast<size_t>(std::max(ranks, 1)));
  return {.one_shot_bytes = std::clamp(one_shot, 4 * kKiB, 64 * kKiB),
          .chunk_bytes = std::clamp(share, 128 * kKiB, kMiB),
          .streaming_bytes = std::clamp(caches.last / 2, kMiB, 32 * kMiB)};
}

Tuning parse_tuning(std::string_view text, const Tuning& defaults, int ranks) {
  Tuning tuning = defaults;
  try {
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(',', begin), text.size());
      const auto entry = text.substr(begin, end - begin);
      begin = end + 1;
      const auto name = entry.substr(0, entry.find('='));
      size_t* const threshold =
          name == "one_shot_bytes"    ? &tuning.one_shot_bytes
          : name == "chunk_bytes"     ? &tuning.chunk_bytes
          : name == "streaming_bytes" ? &tuning.streaming_bytes
                                      : nullptr;
      if (threshold == nullptr || name.size() == entry.size()) {
        throw std::invalid_argument("\"" + std::string(entry) +
                                    "\" is not NAME=BYTES");
      }
      *threshold = static_cast<size_t>(
          parse_int(name, entry.substr(name.size() + 1), 0, INT64_MAX));
    }
    check(tuning, ranks);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        std::string(kVariable) + " is \"" + std::string(text) +
        "\": " + error.what() +
        "; give some of one_shot_bytes, chunk_bytes and streaming_bytes, as "
        "one_shot_bytes=4096,chunk_bytes=131072, or unset it");
  }
  return tuning;
}

Tuning choose_tuning(int ranks) {
  const auto defaults = default_tuning(ranks);
  const auto given = get_env(kVariable);
  return given ? parse_tuning(*given, defaults, ranks) : defaults;
}

void check(const Tuning& tuning, int ranks) {
  check_size("one_shot_bytes", tuning.one_shot_bytes, 64);
  check_size("chunk_bytes", tuning.chunk_bytes, 4096);
  // A quarter of a chunk (Segment::chunking()) has a cache line for each rank.
  const size_t least = size_t{4} * 64 * static_cast<size_t>(ranks);
  if (tuning.chunk_bytes >= least) return;
  throw std::invalid_argument(
      "chunk_bytes is " + std::to_string(tuning.chunk_bytes) + "; with " +
      std::to_string(ranks) + " ranks it must be at least " +
      std::to_string(least));
}

}  // namespace lockstep::internal::shm
