#include "lockstep/base/module.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <vector>

#include "lockstep/base/environment.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> folders() {
  if (const auto folder = get_env("LOCKSTEP_MODULE_PATH")) return {*folder};
  std::vector<fs::path> all;
  std::error_code error;
  auto folder = fs::read_symlink("/proc/self/exe", error).parent_path();
  // A program of a build tree may lie in a folder of bin.
  for (int level = 0; level < 3 && !folder.empty(); ++level) {
    all.push_back(folder / "lib" / "lockstep");
    folder = folder.parent_path();
  }
  all.emplace_back(LOCKSTEP_INSTALLED_MODULES);
  return all;
}

fs::path find(const std::string& name) {
  const auto candidates = folders();
  std::string looked_in;
  for (const auto& folder : candidates) {
    const auto path = folder / name;
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0) {
      // A folder above the program may be one that anybody writes to.
      if (status.st_uid != 0 && status.st_uid != ::geteuid()) {
        throw std::runtime_error(path.string() +
                                 " belongs to neither this user nor root");
      }
      return path;
    }
    looked_in += (looked_in.empty() ? "" : ", ") + path.string();
  }
  throw std::runtime_error("there is no " + looked_in);
}

}  // namespace

void* load_module(const std::string& name, const char* symbol, bool global) {
  const auto path = find(name);
  // Never closed: LibTorch cannot be unloaded.
  void* module =
      ::dlopen(path.c_str(),
               RTLD_NOW | RTLD_NODELETE | (global ? RTLD_GLOBAL : RTLD_LOCAL));
  if (module == nullptr) throw std::runtime_error(::dlerror());
  void* found = ::dlsym(module, symbol);
  if (found == nullptr) {
    throw std::runtime_error(path.string() +
                             " is another module: " + ::dlerror());
  }
  return found;
}

}  // namespace lockstep
