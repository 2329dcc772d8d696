#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::internal {

// Adds the subcommand `lockstep bench` to `app`. It replaces this process by
// the program libexec/lockstep/lockstep-bench, which gets all arguments after
// "bench" as they are and is found relative to this program. Parsing the
// subcommand returns only if that program cannot be executed: it then writes
// one line to stderr and sets `exit_code`.
void add_bench_command(CLI::App& app, int argc, char** argv, int& exit_code);

}  // namespace lockstep::internal
