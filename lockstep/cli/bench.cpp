#include "lockstep/cli/bench.h"

#include <errno.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "lockstep/cli/command_line.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kBenchName = "lockstep bench";
constexpr int kNotFound = 127;  // as in a shell
constexpr int kCannotExecute = 126;

// Returns where the program lies in an installation, and in a build.
std::vector<fs::path> candidates() {
  std::error_code error;
  const fs::path bin = fs::read_symlink("/proc/self/exe", error).parent_path();
  std::vector<fs::path> paths;
  for (const char* folder : {LOCKSTEP_LIBEXEC_FROM_BIN, "../libexec"}) {
    paths.push_back(
        (bin / folder / "lockstep/lockstep-bench").lexically_normal());
  }
  return paths;
}

int execute(int argc, char** argv) {
  std::string name = "lockstep-bench";
  std::vector<char*> arguments{name.data()};
  arguments.insert(arguments.end(), argv + 2, argv + argc);
  arguments.push_back(nullptr);
  const auto paths = candidates();
  for (const auto& path : paths) {
    execv(path.c_str(), arguments.data());
    if (errno == ENOENT) continue;
    write_message(kBenchName, path.string() + ": " + std::strerror(errno));
    return kCannotExecute;
  }
  write_message(kBenchName,
                paths.front().string() +
                    " is missing; build it (./dev build), or install "
                    "Lockstep again");
  return kNotFound;
}

}  // namespace

void add_bench_command(CLI::App& app, int argc, char** argv, int& exit_code) {
  CLI::App* bench = app.add_subcommand(
      "bench", "Time the collective operations, also beside Python's");
  // All arguments belong to the other program, even --help.
  bench->set_help_flag();
  bench->prefix_command();
  bench->callback(
      [argc, argv, &exit_code] { exit_code = execute(argc, argv); });
}

}  // namespace lockstep::internal
