#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace lockstep::internal {

// The ranks made different calls. All of them fail for that reason: a peer that
// has gone since is not the cause.
class Disagreement final : public c10::DistBackendError {
 public:
  using c10::DistBackendError::DistBackendError;
};

// Return the message of an exception, without LibTorch's stack trace.
std::string words_of(const std::exception& error);
std::string words_of(const std::exception_ptr& failure);

}  // namespace lockstep::internal
