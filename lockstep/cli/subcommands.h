#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::internal {

// Adds the subcommand `lockstep run`, which takes torchrun's options
// (docs/launcher.md), to `app`. If it is given, parsing runs the launch to its
// end and stores its exit code in `exit_code`. Messages go to stderr, each line
// after "lockstep run: "; a user's mistake is one line.
void add_run_command(CLI::App& app, int& exit_code);

// Adds the subcommand `lockstep bench` to `app`. It replaces this process by
// the program libexec/lockstep/lockstep-bench, which gets all arguments after
// "bench" as they are and is found relative to this program. Parsing the
// subcommand returns only if that program cannot be executed: it then writes
// one line to stderr and sets `exit_code`.
void add_bench_command(CLI::App& app, int argc, char** argv, int& exit_code);

// Adds `lockstep doctor`, which looks at this host and says what a job would
// find missing or slow there (docs/doctor.md). Takes some seconds: it starts
// programs that link LibTorch. `exit_code` becomes 0 if no check fails,
// otherwise 1 (launch/process/exit_code.h).
void add_doctor_command(CLI::App& app, int& exit_code);

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

// Adds the command `scaling` to `report`, which belongs to `app`. It runs a
// program with several numbers of processes, and says how much faster it trains
// (docs/scaling.md). If the command is given, parsing runs it and stores in
// `exit_code`
//
//   0              the report was printed
//   1              a run failed; one line on stderr and the end of its output
//   2              the arguments are wrong
//   126, 127       the program cannot be executed; there is none
//   128 + signal   SIGINT, SIGTERM or SIGHUP came; no process is left
void add_scaling_command(CLI::App& report, CLI::App& app, int& exit_code);

// Adds `lockstep completion bash|zsh`, which prints a script for the shell to
// evaluate: it completes the commands of `app` and their options, as the
// parser has them when the script is printed. `app` must outlive the parsing.
void add_completion_command(CLI::App& app);

// Adds `lockstep jobs`, which lists the running jobs of this user.
void add_jobs_command(CLI::App& app, int& exit_code);

// Adds `lockstep status`, which prints how a running job does, once.
void add_status_command(CLI::App& app, int& exit_code);

// Adds `lockstep top`, which shows on a terminal how a running job does.
void add_top_command(CLI::App& app, int& exit_code);

// Adds `lockstep profile`, which records a running job for some seconds.
void add_profile_command(CLI::App& app, int& exit_code);

// Adds `lockstep stacks`, which prints where the ranks of a running job are.
void add_stacks_command(CLI::App& app, int& exit_code);

// Returns where a program of libexec/lockstep lies, relative to the running
// `lockstep`, in a build or in an installation; nothing if it is missing.
std::optional<std::filesystem::path> find_libexec(const std::string& program);

// Replaces this process by a program of libexec/lockstep. `command` is what the
// user typed, for messages. Returns only if that fails, after writing
// why; the result is the exit code, as a shell's: 127 if there is no such
// program, otherwise 126.
int execute_libexec(const std::string& command, std::string program,
                    std::vector<std::string> arguments);

}  // namespace lockstep::internal
