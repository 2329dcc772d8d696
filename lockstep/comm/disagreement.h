#pragma once

#include <c10/util/Exception.h>

namespace lockstep::internal {

// The ranks made different calls. All of them fail for that reason: a peer that
// has gone since is not the cause.
class Disagreement final : public c10::DistBackendError {
 public:
  using c10::DistBackendError::DistBackendError;
};

}  // namespace lockstep::internal
