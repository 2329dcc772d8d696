#pragma once

#include <cstdint>
#include <vector>

namespace lockstep::internal::testing {

// The samples on which resume_rank.cpp trains, and which resume_job_test.cpp
// expects.
inline constexpr int64_t kResumeSamples = 97;
inline const std::vector<int64_t> kResumeBoundaries{20, 35};

inline std::vector<int64_t> resume_lengths() {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < kResumeSamples; ++i) lengths.push_back(i * 29 % 50);
  return lengths;
}

}  // namespace lockstep::internal::testing
