#pragma once

#include <CLI/CLI.hpp>

namespace lockstep {

// `lockstep bench`: the program libexec/lockstep/lockstep-bench takes this
// process's place, and all arguments behind "bench" as they are. It is found
// from where this program lies. Adds the subcommand to `app`; parsing it
// returns only where that program cannot be executed: one line on stderr, and
// `exit_code`.
void add_bench_command(CLI::App& app, int argc, char** argv, int& exit_code);

}  // namespace lockstep
