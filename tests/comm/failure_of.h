// The error text of a call that must fail between ranks.
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace lockstep::internal::testing {

// Returns the words of the c10::DistBackendError that `call` throws; the test
// fails if it throws none, or one with LibTorch's backtrace.
inline std::string failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::DistBackendError& error) {
    EXPECT_STREQ(error.what(), error.what_without_backtrace());
    return error.what();
  }
  ADD_FAILURE() << "no c10::DistBackendError was thrown";
  return {};
}

}  // namespace lockstep::internal::testing
