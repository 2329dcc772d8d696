#pragma once

#include <exception>
#include <map>
#include <string>
#include <vector>

// Shared by the programs that act as one rank of a job (Job in job.h): their
// arguments and their output.
namespace lockstep::internal::testing {

// Returns RANK from the environment.
int own_rank();

// Writes the line "WHAT RANK MORE" to stdout, and flushes it.
void say(const char* what, const std::string& more = {});

// Returns the message without the trace; line ends are " | ".
std::string one_line(const std::exception& error);

// Arguments of the form NAME=N.
class Arguments {
 public:
  explicit Arguments(const std::vector<std::string>& given);
  int get(const std::string& name, int otherwise = 0) const;

 private:
  std::map<std::string, int> values_{};
};

// The program itself, with its arguments "SCENARIO BACKEND NAME=N ...". Returns
// the exit status. With together=1 it is called when all ranks have started, so
// that a short `timeout` does not include the time that LibTorch takes to load.
int run(const std::string& scenario, const std::string& backend,
        const Arguments& given);

}  // namespace lockstep::internal::testing
