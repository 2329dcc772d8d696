#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "lockstep/base/shown_text.h"
#include "lockstep/cli/command_line.h"
#include "lockstep/cli/subcommands.h"
#include "lockstep/launch/process/exit_code.h"

namespace {

// If a descriptor from 0 to 2 were closed, the next pipe or socket would get
// its number, and a worker's output would go there.
void open_standard_streams() {
  for (int fd = 0; fd < 3; ++fd) {
    if (fcntl(fd, F_GETFD) == -1) open("/dev/null", O_RDWR);
  }
}

// Returns the folder in which this program lies in bin.
std::filesystem::path installation() {
  return std::filesystem::read_symlink("/proc/self/exe")
      .parent_path()
      .parent_path();
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  CLI::App app("Distributed training for LibTorch.", "lockstep");
  app.formatter(
      lockstep::internal::make_help_formatter("lockstep COMMAND ..."));
  app.set_version_flag("-V,--version", "lockstep " LOCKSTEP_VERSION,
                       "Print the version and exit");
  app.get_help_ptr()->description("Print this help and exit");
  app.add_flag_callback(
         "--cmake-prefix",
         [] { throw CLI::CallForVersion(installation().string(), 0); },
         "Print the folder for CMAKE_PREFIX_PATH, with which find_package() of "
         "CMake finds this Lockstep, and exit")
      ->configurable(false);
  app.require_subcommand(1);
  int exit_code = 0;
  lockstep::internal::add_run_command(app, exit_code);
  lockstep::internal::add_jobs_command(app, exit_code);
  lockstep::internal::add_status_command(app, exit_code);
  lockstep::internal::add_top_command(app, exit_code);
  lockstep::internal::add_profile_command(app, exit_code);
  lockstep::internal::add_stacks_command(app, exit_code);
  lockstep::internal::add_bench_command(app, argc, argv, exit_code);
  lockstep::internal::add_doctor_command(app, exit_code);
  lockstep::internal::add_inspect_command(app, exit_code);
  lockstep::internal::add_report_command(app, exit_code);
  lockstep::internal::add_completion_command(app);
  app.add_subcommand("help", "Print the help of a command");

  std::vector<std::string> arguments(argv + 1, argv + argc);
  if (!arguments.empty() && arguments[0] == "help") {
    arguments.erase(arguments.begin());
    arguments.push_back("--help");
  }
  const std::string word = arguments.empty() ? "" : arguments[0];
  const auto commands =
      app.get_subcommands([](const CLI::App*) { return true; });
  const bool is_command =
      std::any_of(commands.begin(), commands.end(),
                  [&](const CLI::App* one) { return one->get_name() == word; });
  const std::string command = is_command ? "lockstep " + word : "lockstep";
  if (!is_command && !word.empty() &&
      app.get_option_no_throw(word) == nullptr) {
    const std::string kind = word[0] == '-' ? "option" : "command";
    lockstep::internal::write_message(
        command, "unknown " + kind + " \"" + word + "\"; see lockstep --help");
    return lockstep::internal::kUsageError;
  }
  try {
    arguments = lockstep::internal::separate_values(app, std::move(arguments));
    // CLI11 takes the arguments in reverse order.
    std::reverse(arguments.begin(), arguments.end());
    app.parse(std::move(arguments));
    return lockstep::internal::end_output(command, exit_code);
  } catch (const CLI::Success& help_or_version) {
    return lockstep::internal::end_output(
        command, app.exit(help_or_version, std::cout, std::cerr));
  } catch (const CLI::ParseError& error) {
    lockstep::internal::write_message(
        command, lockstep::internal::shown_line(error.what()) + "; see " +
                     command + " --help");
    return lockstep::internal::kUsageError;
  } catch (const std::exception& error) {
    lockstep::internal::write_message(command, error.what());
    return 1;
  }
}
