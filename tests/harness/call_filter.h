#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

#include <cstddef>

namespace lockstep::internal::testing {

// Lets `program` decide which system calls this thread may make, for good.
// Returns false if the system cannot do that.
template <size_t N>
bool filter_calls(sock_filter (&program)[N]) {
  const sock_fprog filter{N, program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

}  // namespace lockstep::internal::testing
