#include <stdexcept>

#include "lockstep/base/module.h"
#include "lockstep/launch/nodes/agent_store.h"
#include "lockstep/launch/nodes/job_secret.h"

namespace lockstep::internal {
namespace {

constexpr const char* kOwnModule = "lockstep_store.so";
constexpr const char* kOwnLinks = "OpenSSL 3";
constexpr const char* kStoreNeed =
    "several nodes need the module for their store";

void* load(const std::string& need, const std::string& file, const char* symbol,
           const std::string& links) {
  try {
    return load_module(file, symbol);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(
        need + ", which cannot be loaded: " + std::string(error.what()) +
        "; it is installed with Lockstep as " + "lib/lockstep/" + file +
        " beside bin, and links " + links);
  }
}

}  // namespace

std::unique_ptr<AgentStore> open_lockstep_store(
    const AgentStoreAddress& address) {
  static const auto open = reinterpret_cast<OpenAgentStore>(
      load(kStoreNeed, kOwnModule, kOpenAgentStore, kOwnLinks));
  return std::unique_ptr<AgentStore>(open(address));
}

std::unique_ptr<AgentStore> open_c10d_store(const AgentStoreAddress& address) {
  static const auto open = reinterpret_cast<OpenAgentStore>(
      load(kStoreNeed, "c10d_store.so", kOpenAgentStore, "LibTorch"));
  return std::unique_ptr<AgentStore>(open(address));
}

std::string metrics_token(const std::string& secret) {
  const auto derive = reinterpret_cast<DeriveMetricsToken>(
      load("metrics that other hosts read with a secret need a module",
           kOwnModule, kDeriveMetricsToken, kOwnLinks));
  std::string token;
  derive(secret, token);
  return token;
}

}  // namespace lockstep::internal
