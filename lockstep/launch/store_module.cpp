#include <dlfcn.h>

#include <filesystem>
#include <stdexcept>

#include "lockstep/base/environment.h"
#include "lockstep/launch/agent_store.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModule = "c10d_store.so";

fs::path module_path() {
  if (const auto folder = get_env("LOCKSTEP_MODULE_PATH")) {
    return fs::path(*folder) / kModule;
  }
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  return program.parent_path().parent_path() / "lib" / "lockstep" / kModule;
}

OpenAgentStore load() {
  const fs::path path = module_path();
  // Never closed: LibTorch cannot be unloaded.
  void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (module == nullptr) {
    throw std::runtime_error(
        std::string("several nodes need the module for c10d's store, which "
                    "cannot be loaded: ") +
        dlerror() + "; it is installed with Lockstep as lib/lockstep/" +
        kModule + " beside bin, and links LibTorch");
  }
  void* symbol = dlsym(module, kOpenAgentStore);
  if (symbol == nullptr) {
    throw std::runtime_error(path.string() +
                             " is no store module: " + dlerror());
  }
  return reinterpret_cast<OpenAgentStore>(symbol);
}

}  // namespace

std::unique_ptr<AgentStore> open_c10d_store(const AgentStoreAddress& address) {
  static const OpenAgentStore open = load();
  return std::unique_ptr<AgentStore>(open(address));
}

}  // namespace lockstep
