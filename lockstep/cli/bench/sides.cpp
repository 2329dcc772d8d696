#include "lockstep/cli/bench/sides.h"

#include <filesystem>

#include "lockstep/base/environment.h"

namespace lockstep::internal::bench {
namespace {

namespace fs = std::filesystem;

// The programs of the benchmark lie in one folder.
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

std::string timeout_of(const Options& options) {
  return std::to_string(options.timeout.count());
}

// Returns a side that plain/protocol_main.cpp implements.
Side plain(const std::string& name, const Options& options) {
  return {name,
          resolve_program(
              {beside("lockstep-bench-protocol"), name, timeout_of(options)},
              ProgramKind::executable),
          Launch::by_program, true};
}

// Makes the sides that were asked for.
class Sides {
 public:
  Sides(const Options& options, std::vector<std::string>& left_out)
      : options_(options), left_out_(left_out) {}

  std::vector<Side> all() {
    add_ours("lockstep", options_.backend);
    for (const auto& peer : options_.peers) add(peer);
    return std::move(all_);
  }

 private:
  void add(const std::string& peer) {
    if (peer == "registered") {
      if (options_.backend == "gloo") {
        return leave_out(peer, "backend gloo has no registered memory");
      }
      return add_ours(peer, options_.backend, "registered");
    }
    if (peer == "gloo") {
      if (options_.backend == "gloo")
        return leave_out(peer, "our side is gloo");
      return add_ours(peer, "gloo");
    }
    if (peer == "protocol") all_.push_back(protocol_side(options_));
    if (peer == "kernel") all_.push_back(plain("kernel", options_));
    if (peer == "openmpi") add_openmpi();
    if (peer == "python") add_python();
  }

  void add_ours(const std::string& name, const std::string& backend,
                const std::string& memory = "ordinary") {
    all_.push_back({name,
                    resolve_program({beside("lockstep-bench-rank"), backend,
                                     timeout_of(options_), memory},
                                    ProgramKind::executable),
                    Launch::by_world, false});
  }

  void add_openmpi() {
    const fs::path path = folder_of_this_program() / "lockstep-bench-openmpi";
    if (!fs::exists(path)) {
      return leave_out("openmpi",
                       "it was not built, as there was no mpi.h (Debian: "
                       "libopenmpi-dev)");
    }
    try {
      resolve_program({"mpirun"}, ProgramKind::executable);
    } catch (const ProgramError& error) {
      return leave_out("openmpi", error.what());
    }
    all_.push_back({"openmpi",
                    resolve_program({path.string()}, ProgramKind::executable),
                    Launch::by_program, true});
  }

  void add_python() {
    const std::string script = beside("lockstep-bench-python.py");
    try {
      all_.push_back({"python",
                      resolve_program({find_python(options_.python), script,
                                       timeout_of(options_)},
                                      ProgramKind::executable),
                      Launch::by_world, false});
    } catch (const ProgramError& error) {
      throw std::invalid_argument(
          std::string(error.what()) +
          "; with --python or LOCKSTEP_PYTHON name a Python that has torch");
    }
  }

  void leave_out(const std::string& peer, const std::string& why) {
    left_out_.push_back("without " + peer + ": " + why);
  }

  const Options& options_;
  std::vector<std::string>& left_out_;
  std::vector<Side> all_;
};

}  // namespace

std::vector<Side> sides(const Options& options,
                        std::vector<std::string>& left_out) {
  return Sides(options, left_out).all();
}

Side protocol_side(const Options& options) {
  return plain("protocol", options);
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

}  // namespace lockstep::internal::bench
