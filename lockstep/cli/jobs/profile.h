#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::internal {

// Adds `lockstep profile`, which records a running job for some seconds.
void add_profile_command(CLI::App& app, int& exit_code);

}  // namespace lockstep::internal
