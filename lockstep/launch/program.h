#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep {

// What every worker executes.
struct Program {
  std::string path{};                    // for execve: it has a slash
  std::vector<std::string> arguments{};  // argv, argv[0] included

  // Puts the number in for ${local_rank} and $local_rank in all arguments but
  // the first, as torchrun does (elastic/utils/api.py, macros.substitute). "$$"
  // stays, which torchrun would make a "$".
  void expand_local_rank(int local_rank);
};

// A program that cannot be started. `exit_code()` is the shell's: 127 where it
// was not found, 126 where it was found and cannot be executed.
class ProgramError : public std::invalid_argument {
 public:
  ProgramError(int exit_code, const std::string& line)
      : std::invalid_argument(line), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

enum class ProgramKind {
  by_name,        // "*.py" runs under Python, anything else as it is
  executable,     // --no-python: as it is, whatever its name
  python_module,  // --module: python -m
};

// Finds the program before any worker is started. `command` is the program and
// its arguments, not empty. A name without a slash is searched for in PATH as
// execvp does. Python is the value of PYTHON_EXEC, else python3, else python
// from PATH, with -u as torchrun gives it, so that lines come when written.
// Throws ProgramError that names the path and what is wrong with it.
Program resolve_program(const std::vector<std::string>& command,
                        ProgramKind kind);

}  // namespace lockstep
