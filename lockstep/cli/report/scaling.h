#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::internal {

// Adds the command `scaling` to `report`, which belongs to `app`. It runs a
// program with several numbers of processes, and says how much faster it trains
// (docs/scaling.md). If the command is given, parsing runs it and stores in
// `exit_code`
//
//   0              the report was printed
//   1              a run failed; one line on stderr and the end of its output
//   2              the arguments are wrong
//   126, 127       the program cannot be executed; there is none
//   128 + signal   SIGINT, SIGTERM or SIGHUP came; no process is left
void add_scaling_command(CLI::App& report, CLI::App& app, int& exit_code);

}  // namespace lockstep::internal
