#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::internal {

// Adds `lockstep doctor`, which looks at this host and says what a job would
// find missing or slow there (docs/doctor.md). Takes some seconds: it starts
// programs that link LibTorch. `exit_code` becomes 0 if no check fails,
// otherwise 1 (launch/exit_code.h).
void add_doctor_command(CLI::App& app, int& exit_code);

}  // namespace lockstep::internal
