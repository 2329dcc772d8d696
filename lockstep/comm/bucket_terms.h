#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace lockstep::internal {

// Which elements of a bucket hold the reduced values after a reduction; the
// others are undefined.
enum class Results : uint8_t {
  everywhere,  // all, on every rank: an all-reduce
  owned,       // those that the rank owns: a reduce-scatter in place
};

// In place of an offset in a rank's arena, for a movable range of a bucket: the
// range lies in the bucket.
inline constexpr uint64_t kInBucket = ~uint64_t{0};

// How the errors of a reduction call its iterations, whose numbers may be codes
// that only its caller understands.
struct IterationWords {
  // After "rank 1 has given up".
  std::function<std::string(int64_t)> name = [](int64_t iteration) {
    return "iteration " + std::to_string(iteration);
  };
  // If the ranks' iterations differ: "DIFFERENCE: rank 0 DESCRIBED, rank 1
  // DESCRIBED; REMEDY".
  std::string difference = "the ranks average different iterations";
  std::function<std::string(int64_t)> described = [](int64_t iteration) {
    return "number " + std::to_string(iteration);
  };
  std::string remedy = "every rank must call backward equally often";
};

}  // namespace lockstep::internal
