#include "lockstep/cli/subcommands.h"

#include <errno.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "lockstep/cli/command_line.h"

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

constexpr int kNotFound = 127;
constexpr int kCannotExecute = 126;

// Returns where the program lies in an installation, and in a build.
std::vector<fs::path> candidates(const std::string& program) {
  std::error_code error;
  const fs::path bin = fs::read_symlink("/proc/self/exe", error).parent_path();
  std::vector<fs::path> paths;
  for (const char* folder : {LOCKSTEP_LIBEXEC_FROM_BIN, "../libexec"}) {
    paths.push_back((bin / folder / "lockstep" / program).lexically_normal());
  }
  return paths;
}

}  // namespace

std::optional<fs::path> find_libexec(const std::string& program) {
  std::error_code error;
  for (const auto& path : candidates(program)) {
    if (fs::exists(path, error)) return path;
  }
  return std::nullopt;
}

int execute_libexec(const std::string& command, std::string program,
                    std::vector<std::string> arguments) {
  const auto paths = candidates(program);
  std::vector<char*> all{program.data()};
  for (auto& argument : arguments) all.push_back(argument.data());
  all.push_back(nullptr);
  for (const auto& path : paths) {
    execv(path.c_str(), all.data());
    if (errno == ENOENT) continue;
    write_message(command, path.string() + ": " + std::strerror(errno));
    return kCannotExecute;
  }
  write_message(command, paths.front().string() +
                             " is missing; build it (./dev build), or install "
                             "Lockstep again");
  return kNotFound;
}

void add_bench_command(CLI::App& app, int argc, char** argv, int& exit_code) {
  CLI::App* bench = app.add_subcommand(
      "bench", "Time the collective operations, also beside Python's");
  // All arguments belong to the other program, even --help.
  bench->set_help_flag();
  bench->prefix_command();
  bench->callback([argc, argv, &exit_code] {
    std::vector<std::string> arguments(argv + 2, argv + argc);
    // "lockstep help bench".
    if (std::string_view(argv[1]) == "help") arguments = {"--help"};
    exit_code = execute_libexec("lockstep bench", "lockstep-bench", arguments);
  });
}

}  // namespace lockstep::internal
