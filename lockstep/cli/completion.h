#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::internal {

// Adds `lockstep completion bash|zsh`, which prints a script for the shell to
// evaluate: it completes the commands of `app` and their options, as the
// parser has them when the script is printed. `app` must outlive the parsing.
void add_completion_command(CLI::App& app);

}  // namespace lockstep::internal
