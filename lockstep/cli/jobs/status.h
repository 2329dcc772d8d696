#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::internal {

// Adds `lockstep status`, which prints how a running job does, once.
void add_status_command(CLI::App& app, int& exit_code);

}  // namespace lockstep::internal
