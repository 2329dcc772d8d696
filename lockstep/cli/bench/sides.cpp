#include "lockstep/cli/bench/sides.h"

#include <filesystem>

#include "lockstep/base/environment.h"

namespace lockstep::bench {
namespace {

namespace fs = std::filesystem;

// The programs of one folder belong together.
fs::path folder_of_this_program() {
  return fs::read_symlink("/proc/self/exe").parent_path();
}

std::string beside(const std::string& name) {
  const fs::path path = folder_of_this_program() / name;
  if (!fs::exists(path)) {
    throw std::invalid_argument(path.string() +
                                " is missing; build or install Lockstep again");
  }
  return path.string();
}

}  // namespace

std::vector<Side> sides(const Options& options) {
  const std::string timeout = std::to_string(options.timeout.count());
  std::vector<Side> all;
  all.push_back({"lockstep", resolve_program({beside("lockstep-bench-rank"),
                                              options.backend, timeout},
                                             ProgramKind::executable)});
  if (!options.peers) return all;
  const std::string script = beside("lockstep-bench-python.py");
  try {
    all.push_back({"python", resolve_program(
                                 {find_python(options.python), script, timeout},
                                 ProgramKind::executable)});
  } catch (const ProgramError& error) {
    throw std::invalid_argument(std::string(error.what()) +
                                "; name a Python that has torch by --python "
                                "or LOCKSTEP_PYTHON");
  }
  return all;
}

std::string find_python(const std::string& given) {
  if (!given.empty()) return given;
  if (const auto named = get_env("LOCKSTEP_PYTHON")) return *named;
  fs::path folder = folder_of_this_program();
  while (folder != folder.root_path()) {
    folder = folder.parent_path();
    const fs::path python = folder / ".venv/bin/python";
    std::error_code ignored;
    if (fs::exists(python, ignored)) return python.string();
  }
  return "python3";
}

}  // namespace lockstep::bench
