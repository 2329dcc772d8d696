#include "lockstep/parallel/comm_hooks/real_gradients.h"

#include <c10/util/StringUtil.h>

#include <stdexcept>

namespace lockstep::internal {

void require_real(const GradBucket& bucket, const char* hook) {
  const auto dtype = bucket.buffer().scalar_type();
  if (!c10::isComplexType(dtype)) return;
  throw std::invalid_argument(c10::str(
      hook, ": the gradients of a bucket are ", dtype,
      ", and the hook compresses real numbers only; with complex parameters "
      "use allreduce_hook, or no hook"));
}

}  // namespace lockstep::internal
