#include "lockstep/base/module.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <vector>

#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

struct Folder {
  fs::path path;
  bool told;  // named by the user or the installation, not guessed
};

fs::path program() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error);
}

std::vector<Folder> folders() {
  if (const auto folder = get_env("LOCKSTEP_MODULE_PATH")) {
    return {{*folder, true}};
  }
  std::vector<Folder> all;
  auto folder = program().parent_path();
  // In a build tree the program may lie in a folder below bin.
  for (int level = 0; level < 3 && !folder.empty(); ++level) {
    all.push_back({folder / "lib" / "lockstep", false});
    folder = folder.parent_path();
  }
  all.push_back({LOCKSTEP_INSTALLED_MODULES, true});
  return all;
}

// Any user may be able to write to a folder above the program, so the owner of
// a file that was found there must be one of these.
bool trusted(uid_t owner) {
  struct stat status {};
  return owner == 0 || owner == ::geteuid() ||
         (::stat(program().c_str(), &status) == 0 && owner == status.st_uid);
}

fs::path find(const std::string& name) {
  std::string looked_for;
  for (const auto& folder : folders()) {
    const auto path = folder.path / name;
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0) {
      if (folder.told || trusted(status.st_uid)) return path;
      throw std::runtime_error(path.string() +
                               " belongs to neither this user, nor root, nor "
                               "the owner of the program");
    }
    looked_for += (looked_for.empty() ? "" : ", ") + path.string();
  }
  throw std::runtime_error("cannot find " + looked_for);
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
    throw std::runtime_error(
        path.string() +
        " is not the module that was asked for: " + ::dlerror());
  }
  return found;
}

}  // namespace lockstep::internal
