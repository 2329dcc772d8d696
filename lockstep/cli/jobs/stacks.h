#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::internal {

// Adds `lockstep stacks`, which prints where the ranks of a running job are.
void add_stacks_command(CLI::App& app, int& exit_code);

}  // namespace lockstep::internal
