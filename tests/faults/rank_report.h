#pragma once

#include <exception>
#include <map>
#include <string>
#include <vector>

// What the programs that stand for one rank of a job (Job in job.h) have in
// common: their arguments, and what they say.
namespace lockstep::testing {

// RANK of the environment.
int own_rank();

// "WHAT RANK MORE" as a line on stdout, at once.
void say(const char* what, const std::string& more = {});

// Without the trace; line ends are " | ".
std::string one_line(const std::exception& error);

// NAME=N ...
class Arguments {
 public:
  explicit Arguments(const std::vector<std::string>& given);
  int get(const std::string& name, int otherwise = 0) const;

 private:
  std::map<std::string, int> values_{};
};

// The program itself: "SCENARIO BACKEND NAME=N ...", its arguments. Returns its
// exit status.
int run(const std::string& scenario, const std::string& backend,
        const Arguments& given);

}  // namespace lockstep::testing
