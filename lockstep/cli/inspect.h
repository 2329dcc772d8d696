#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::internal {

// Adds the command `lockstep inspect flight FILE...` to `app`. It finds the
// rank that diverged first by the flight records of the ranks of one job
// (docs/flight-recorder.md). If the command is given, parsing runs it and
// stores in `exit_code`
//
//   0  the ranks made the same calls, as far as the records say
//   1  a rank made another call, did not come, or left no record while
//      others wait for it
//   2  a record cannot be read; one line on stderr says which and why
//
// The report goes to stdout, as a table or with --json as one document.
void add_inspect_command(CLI::App& app, int& exit_code);

}  // namespace lockstep::internal
