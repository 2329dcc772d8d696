#include "lockstep/cli/subcommands.h"

#include <string>
#include <vector>

#include "lockstep/cli/libexec.h"

namespace lockstep::internal {

void add_bench_command(CLI::App& app, int argc, char** argv, int& exit_code) {
  CLI::App* bench = app.add_subcommand(
      "bench", "Time the collective operations, also beside Python's");
  // All arguments belong to the other program, even --help.
  bench->set_help_flag();
  bench->prefix_command();
  bench->callback([argc, argv, &exit_code] {
    exit_code =
        execute_libexec("lockstep bench", "lockstep-bench",
                        std::vector<std::string>(argv + 2, argv + argc));
  });
}

}  // namespace lockstep::internal
