#pragma once

#include <CLI/CLI.hpp>

namespace lockstep {

// `lockstep run`: torchrun's options (docs/launcher.md). Adds the
// subcommand to `app`; when it was given, parsing runs it to its end and puts
// the exit code of the launch into `exit_code`. What it has to say goes to
// stderr, each line behind "lockstep run: "; a user's mistake is one line.
void add_run_command(CLI::App& app, int& exit_code);

}  // namespace lockstep
