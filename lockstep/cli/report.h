#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::internal {

// Adds the command `lockstep report trace DIR` to `app`. It reads the traces
// that a profiler left of each rank of a job, and says where the time of a step
// went (docs/trace-report.md). If the command is given, parsing runs it and
// stores in `exit_code`
//
//   0  the report was printed, perhaps with warnings
//   2  a trace cannot be read or the merged one not written; one line on
//      stderr says which and why
//
// The report goes to stdout, as a table or with --json as one document;
// warnings go to stderr, one line each, and are in the document.
void add_report_command(CLI::App& app, int& exit_code);

}  // namespace lockstep::internal
