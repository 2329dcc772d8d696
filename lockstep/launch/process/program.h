#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/launch/process/child_process.h"

namespace lockstep::internal {

// The program that every worker executes.
struct Program {
  std::string path{};                    // for execve: it has a slash
  std::vector<std::string> arguments{};  // argv, argv[0] included
  bool is_python = false;                // resolve_program() runs it by Python

  // Replaces ${local_rank} and $local_rank by the number in all arguments
  // except the first, as torchrun does (elastic/utils/api.py,
  // macros.substitute). Leaves "$$" as it is, which torchrun would turn into
  // "$".
  void expand_local_rank(int local_rank);
};

// Thrown if a program cannot be started. `exit_code()` is what a shell returns:
// 127 if the program was not found, 126 if it was found but cannot be executed.
class ProgramError : public std::invalid_argument {
 public:
  ProgramError(int exit_code, const std::string& line)
      : std::invalid_argument(line), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

enum class ProgramKind {
  by_name,        // "*.py" runs under Python, all else as it is
  executable,     // --no-python: as it is, whatever its name
  python_module,  // --module: python -m
  python_script,  // --run-path: under Python, whatever its name
};

// Finds the program before any worker is started. `command` is the program and
// its arguments, not empty. A name without a slash is searched for in PATH as
// execvp does. Python is the value of PYTHON_EXEC, otherwise python3, otherwise
// python from PATH. It gets -u, as under torchrun, so that lines appear when
// they are written. Throws ProgramError that names the path and what is wrong
// with it.
Program resolve_program(const std::vector<std::string>& command,
                        ProgramKind kind);

// Starts a program in a child, as ChildProcess::start() does, but throws
// ProgramError if the kernel refuses the program.
ChildProcess start_program(const ChildStart& start);

}  // namespace lockstep::internal
