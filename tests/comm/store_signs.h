#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/process_group.h"

// Orders the actions of a test's ranks without what is under test: one rank
// tells that it has come to a point, the others wait for that.
namespace lockstep::internal::testing {

inline void tell(const ProcessGroupPtr& group, const std::string& key) {
  inside(group).store()->set(key, std::vector<uint8_t>{1});
}

// Blocks for at most 30 s, then throws c10::DistStoreError.
inline void await(const ProcessGroupPtr& group, const std::string& key) {
  inside(group).store()->wait({key}, std::chrono::seconds(30));
}

}  // namespace lockstep::internal::testing
