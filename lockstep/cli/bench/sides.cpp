#include "lockstep/cli/bench/sides.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
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

// Returns `given` (--python), otherwise LOCKSTEP_PYTHON, otherwise
// .venv/bin/python in a folder above this program, otherwise python3 from PATH.
// Whether that Python has torch shows only when it is started.
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
  void add(const Peer& peer) {
    const auto& [name, program] = peer;
    if (!program.empty()) {
      all_.push_back({name,
                      resolve_program({program, name, timeout_of(options_)},
                                      ProgramKind::executable),
                      Launch::by_program});
    } else if (name == "python") {
      add_python(name, "gloo");
    } else if (name == kPythonLockstep) {
      add_python(name, "lockstep");
    } else if (options_.backend == "gloo") {
      leave_out(name, name == "gloo" ? "our side is gloo"
                                     : "backend gloo has no registered memory");
    } else if (name == "gloo") {
      add_ours(name, "gloo");
    } else {
      add_ours(name, options_.backend, "registered");
    }
  }

  void add_ours(const std::string& name, const std::string& backend,
                const std::string& memory = "ordinary") {
    all_.push_back({name,
                    resolve_program({beside("lockstep-bench-rank"), backend,
                                     timeout_of(options_), memory},
                                    ProgramKind::executable),
                    Launch::by_world});
  }

  void add_python(const std::string& name, const std::string& backend) {
    const std::string script = beside("lockstep-bench-python.py");
    try {
      all_.push_back({name,
                      resolve_program({find_python(options_.python), script,
                                       timeout_of(options_), backend},
                                      ProgramKind::executable),
                      Launch::by_world});
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

int compute(pid_t parent) {
  // The parent may have died before this thread asked to die with it.
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) return 1;
  std::atomic<unsigned> count = 0;
  while (true) count.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

std::vector<Side> sides(const Options& options,
                        std::vector<std::string>& left_out) {
  return Sides(options, left_out).all();
}

Competitors::Competitors(int count) {
  const pid_t parent = getpid();
  for (int i = 0; i < count; ++i) {
    processes_.push_back(ChildProcess::fork(
        "starting a competing process", [parent] { return compute(parent); }));
  }
}

Competitors::~Competitors() {
  for (auto& process : processes_) process.signal(SIGKILL);
  for (auto& process : processes_) {
    while (!process.ended()) {
      int status = 0;
      if (waitpid(process.pid(), &status, 0) < 0 && errno == EINTR) continue;
      process.set_ended(status);
    }
  }
}

}  // namespace lockstep::internal::bench
