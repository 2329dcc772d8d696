#pragma once

#include <CLI/CLI.hpp>

namespace lockstep {

// `lockstep inspect flight FILE...`: which rank diverged first, by the flight
// records of the ranks of one job (docs/flight-recorder.md). Adds the command
// to `app`; when it was given, parsing runs it and puts into `exit_code`
//
//   0  the ranks called the same, as far as the records say
//   1  a rank called something else, did not come, or left no record while
//      others wait for it
//   2  a record cannot be read; one line on stderr says which and why
//
// The report goes to stdout, as a table or with --json as one document.
void add_inspect_command(CLI::App& app, int& exit_code);

}  // namespace lockstep
