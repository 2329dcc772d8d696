#pragma once

#include <gtest/gtest.h>
#include <torch/utils.h>

#include <functional>

#include "lockstep/comm/init.h"

namespace lockstep::internal::testing {

// Runs `body` in a world over shared memory, then in one over Gloo, each from
// the same random numbers on every rank.
inline void on_both_backends(const std::function<void()>& body) {
  for (const char* backend : {"lockstep", "gloo"}) {
    SCOPED_TRACE(backend);
    auto group = init_process_group(backend);
    torch::manual_seed(7);
    body();
  }
}

}  // namespace lockstep::internal::testing
