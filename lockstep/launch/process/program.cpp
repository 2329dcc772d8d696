#include "lockstep/launch/process/program.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>

#include "lockstep/base/environment.h"

namespace lockstep::internal {
namespace {

constexpr int kNotFound = 127;
constexpr int kNotExecutable = 126;

std::string system_words(int error) { return std::strerror(error); }

bool is_executable_file(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
         access(path.c_str(), X_OK) == 0;
}

// Throws unless `path`, which has a slash, can be executed.
void check_executable(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) {
    const bool absent = errno == ENOENT || errno == ENOTDIR;
    throw ProgramError(absent ? kNotFound : kNotExecutable,
                       "program " + path + ": " + system_words(errno));
  }
  if (S_ISDIR(status.st_mode)) {
    throw ProgramError(kNotExecutable,
                       "program " + path + " is a directory; give a file");
  }
  if (access(path.c_str(), X_OK) != 0) {
    throw ProgramError(kNotExecutable, "program " + path +
                                           " is not executable; chmod +x it, "
                                           "or name the interpreter before it");
  }
}

// Returns the first executable `name` in PATH.
std::optional<std::string> find_in_path(const std::string& name) {
  // The default is execvp's own (confstr _CS_PATH).
  const std::string path = get_env("PATH").value_or("/bin:/usr/bin");
  std::string_view rest = path;
  while (true) {
    const size_t colon = rest.find(':');
    std::string directory(rest.substr(0, colon));
    if (directory.empty()) directory = ".";  // what an empty entry means
    std::string candidate = directory + "/" + name;
    if (is_executable_file(candidate)) return candidate;
    if (colon == std::string_view::npos) return std::nullopt;
    rest.remove_prefix(colon + 1);
  }
}

std::string find_executable(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    check_executable(name);
    return name;
  }
  if (auto found = find_in_path(name)) return *found;
  std::string line = "program \"" + name + "\" was not found in PATH";
  if (is_executable_file("./" + name)) {
    line += "; for the one in this directory say ./" + name;
  }
  throw ProgramError(kNotFound, line);
}

std::string find_python() {
  if (auto chosen = get_env("PYTHON_EXEC")) {
    if (chosen->find('/') != std::string::npos) {
      check_executable(*chosen);
      return *chosen;
    }
    if (auto found = find_in_path(*chosen)) return *found;
    throw ProgramError(kNotFound, "PYTHON_EXEC is \"" + *chosen +
                                      "\", which was not found in PATH");
  }
  for (const char* name : {"python3", "python"}) {
    if (auto found = find_in_path(name)) return *found;
  }
  throw ProgramError(kNotFound,
                     "neither python3 nor python was found in PATH; set "
                     "PYTHON_EXEC to the interpreter, or run a program that "
                     "is not a Python script");
}

void check_readable_script(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) {
    throw ProgramError(kNotFound,
                       "Python script " + path + ": " + system_words(errno));
  }
  if (!S_ISREG(status.st_mode) || access(path.c_str(), R_OK) != 0) {
    throw ProgramError(kNotExecutable,
                       "Python script " + path + " is not a readable file");
  }
}

bool continues_name(const std::string& text, size_t at) {
  return at < text.size() &&
         (std::isalnum(static_cast<unsigned char>(text[at])) ||
          text[at] == '_');
}

}  // namespace

void Program::expand_local_rank(int local_rank) {
  const std::string number = std::to_string(local_rank);
  for (size_t index = 1; index < arguments.size(); ++index) {
    std::string& text = arguments[index];
    for (const std::string name : {"${local_rank}", "$local_rank"}) {
      for (size_t at = text.find(name); at != std::string::npos;
           at = text.find(name, at + 1)) {
        const bool escaped = at > 0 && text[at - 1] == '$';
        const bool longer =
            name.back() != '}' && continues_name(text, at + name.size());
        if (!escaped && !longer) text.replace(at, name.size(), number);
      }
    }
  }
}

Program resolve_program(const std::vector<std::string>& command,
                        ProgramKind kind) {
  const std::string& name = command.front();
  if (name.empty()) {
    throw ProgramError(kNotFound, "the program's name is empty; give a path");
  }
  const bool module = kind == ProgramKind::python_module;
  const bool script = kind == ProgramKind::python_script ||
                      (kind == ProgramKind::by_name && name.ends_with(".py"));
  if (!module && !script) return {find_executable(name), command};

  if (script) check_readable_script(name);
  Program program;
  program.is_python = true;
  program.path = find_python();
  program.arguments = {program.path, "-u"};
  if (module) program.arguments.push_back("-m");
  program.arguments.insert(program.arguments.end(), command.begin(),
                           command.end());
  return program;
}

ChildProcess start_program(const ChildStart& start) {
  const std::string name = "program " + start.path;
  try {
    return ChildProcess::start(start);
  } catch (const ExecError& refusal) {
    switch (const int error = refusal.code().value()) {
      case ENOEXEC:
        throw ProgramError(kNotExecutable,
                           name +
                               " is not in a format that this host executes; "
                               "a script begins with #! and its interpreter");
      case ENOENT:
        throw ProgramError(kNotFound, name +
                                          ": it, or the interpreter that it "
                                          "names, does not exist");
      default:
        throw ProgramError(kNotExecutable, name + ": " + system_words(error));
    }
  }
}

}  // namespace lockstep::internal
