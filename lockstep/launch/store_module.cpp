#include <stdexcept>

#include "lockstep/base/module.h"
#include "lockstep/launch/agent_store.h"

namespace lockstep::internal {
namespace {

OpenAgentStore load() {
  try {
    return reinterpret_cast<OpenAgentStore>(
        load_module("c10d_store.so", kOpenAgentStore));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(
        std::string("several nodes need the module for c10d's store, which "
                    "cannot be loaded: ") +
        error.what() +
        "; it is installed with Lockstep as lib/lockstep/c10d_store.so beside "
        "bin, and links LibTorch");
  }
}

}  // namespace

std::unique_ptr<AgentStore> open_c10d_store(const AgentStoreAddress& address) {
  static const OpenAgentStore open = load();
  return std::unique_ptr<AgentStore>(open(address));
}

}  // namespace lockstep::internal
