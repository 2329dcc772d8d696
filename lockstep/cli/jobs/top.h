#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::internal {

// Adds `lockstep top`, which shows on a terminal how a running job does.
void add_top_command(CLI::App& app, int& exit_code);

}  // namespace lockstep::internal
