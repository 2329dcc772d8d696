#include <stdexcept>

#include "lockstep/base/module.h"
#include "lockstep/launch/agent_store.h"

namespace lockstep::internal {
namespace {

OpenAgentStore load(const std::string& file, const std::string& links) {
  try {
    return reinterpret_cast<OpenAgentStore>(load_module(file, kOpenAgentStore));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(
        "several nodes need the module for their store, which cannot be "
        "loaded: " +
        std::string(error.what()) + "; it is installed with Lockstep as " +
        "lib/lockstep/" + file + " beside bin, and links " + links);
  }
}

}  // namespace

std::unique_ptr<AgentStore> open_lockstep_store(
    const AgentStoreAddress& address) {
  static const OpenAgentStore open = load("lockstep_store.so", "OpenSSL 3");
  return std::unique_ptr<AgentStore>(open(address));
}

std::unique_ptr<AgentStore> open_c10d_store(const AgentStoreAddress& address) {
  static const OpenAgentStore open = load("c10d_store.so", "LibTorch");
  return std::unique_ptr<AgentStore>(open(address));
}

}  // namespace lockstep::internal
