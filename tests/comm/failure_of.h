// The error text of a call that must fail between ranks.
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace lockstep::internal::testing {

// Returns the words of the c10::DistBackendError that `call` throws, without
// LibTorch's backtrace; the test fails if `call` throws none.
inline std::string failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "no c10::DistBackendError was thrown";
  return {};
}

}  // namespace lockstep::internal::testing
