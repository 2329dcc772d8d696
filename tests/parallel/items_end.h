#pragma once

#include <cstdint>

namespace lockstep::internal::testing {

// How many steps the jobs of items_job_test.cpp make.
inline constexpr int64_t kEnd = 26;

}  // namespace lockstep::internal::testing
