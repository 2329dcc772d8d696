#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"

// How ranks of a test order what they do by a way that is not under test: one
// tells that it has come to a point, the others wait for that.
namespace lockstep::testing {

inline void tell(const ProcessGroupPtr& group, const std::string& key) {
  group->store()->set(key, std::vector<uint8_t>{1});
}

// Blocks for 30 s at most; throws c10::DistStoreError after that.
inline void await(const ProcessGroupPtr& group, const std::string& key) {
  group->store()->wait({key}, std::chrono::seconds(30));
}

}  // namespace lockstep::testing
