#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::internal {

// Adds the subcommand `lockstep run`, which takes torchrun's options
// (docs/launcher.md), to `app`. If it is given, parsing runs the launch to its
// end and stores its exit code in `exit_code`. Messages go to stderr, each line
// after "lockstep run: "; a user's mistake is one line.
void add_run_command(CLI::App& app, int& exit_code);

}  // namespace lockstep::internal
