#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/backend_registry.h"

namespace lockstep::nccl {

// Blocks until all ranks of a new group have come, because NCCL itself would
// wait for ever for one that does not. Key, in the store of the group and its
// device type: "lockstep/here/R", where R is the rank in the group.
//
// Throws c10::DistBackendError that names the absent ranks, as ranks of the
// default group, when request.timeout is over. The function is in a header
// because its tests need no NCCL.
inline void meet(const BackendRequest& request) {
  const auto deadline = Deadline::after(request.timeout);
  const auto key = [](int rank) {
    return "lockstep/here/" + std::to_string(rank);
  };
  std::vector<std::string> all;
  for (int rank = 0; rank < request.size; ++rank) all.push_back(key(rank));
  request.store->set(all.at(request.rank), std::vector<uint8_t>{1});
  // Polls, because LibTorch prints a warning of its own when Store::wait() runs
  // out of time.
  std::chrono::milliseconds pause{1};
  while (!request.store->check(all)) {
    if (deadline.expired()) {
      std::string absent;
      for (int rank = 0; rank < request.size; ++rank) {
        if (request.store->check({key(rank)})) continue;
        absent += (absent.empty() ? "" : ", ") +
                  std::to_string(request.global_ranks[rank]);
      }
      if (absent.empty()) return;  // the last came at the last moment
      throw c10::DistBackendError({__func__, __FILE__, __LINE__},
                                  "rank " + absent + " did not come in time");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(20));
  }
}

}  // namespace lockstep::nccl
