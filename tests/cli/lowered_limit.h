#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace lockstep::internal::testing {

// A limit of this process that is lowered, and restored at the end.
class LoweredLimit {
 public:
  LoweredLimit(__rlimit_resource resource, rlim_t soft) : resource_(resource) {
    getrlimit(resource_, &before_);
    const rlimit lowered{soft, before_.rlim_max};
    EXPECT_EQ(setrlimit(resource_, &lowered), 0);
  }
  LoweredLimit(const LoweredLimit&) = delete;
  LoweredLimit& operator=(const LoweredLimit&) = delete;
  ~LoweredLimit() { setrlimit(resource_, &before_); }
  const rlimit& before() const { return before_; }

 private:
  __rlimit_resource resource_;
  rlimit before_{};
};

}  // namespace lockstep::internal::testing
