#pragma once

#include <c10/util/Exception.h>

namespace lockstep {

// The ranks called different things. It is a failure of all of them: a peer
// that has gone since is not why.
class Disagreement final : public c10::DistBackendError {
 public:
  using c10::DistBackendError::DistBackendError;
};

}  // namespace lockstep
