#include "lockstep/cli/subcommands.h"

#include <iostream>
#include <string>
#include <vector>

#include "lockstep/cli/command_line.h"

namespace lockstep::internal {
namespace {

// This part of the script reads the words before the one to complete: `place`
// becomes the commands among them, or "program" once the program of `lockstep
// run` has come, as the words after it belong to the program. Bash gives
// "--nnodes=2" as three words, zsh as one. No variable is called `path`, which
// in zsh is PATH.
constexpr const char* kBegin = R"(_lockstep() {
  local place= words= word= expected=
  for word in "${COMP_WORDS[@]:1:$((COMP_CWORD - 1))}"; do
    if [ "$word" = "=" ]; then expected=value; continue; fi
    if [ "$expected" = value ]; then expected=; continue; fi
    case "$place/$word" in
)";
constexpr const char* kMiddle = R"(    esac
  done
  if [ "$expected" = value ] || [ "${COMP_WORDS[COMP_CWORD]}" = "=" ]; then
    return
  fi
  case "$place" in
)";
constexpr const char* kEnd = R"(  esac
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _lockstep lockstep
)";

std::vector<const CLI::App*> subcommands(const CLI::App& command) {
  return command.get_subcommands([](const CLI::App*) { return true; });
}

// Returns every spelling of an option, "--log_dir" too.
std::vector<std::string> spellings(const CLI::Option& option) {
  std::vector<std::string> all;
  for (const auto& name : option.get_snames()) all.push_back("-" + name);
  for (const auto& name : option.get_lnames()) all.push_back("--" + name);
  return all;
}

// Returns the branches by which the script follows the words already typed.
std::string steps(const CLI::App& command, const std::string& path) {
  std::string text;
  for (const auto* sub : subcommands(command)) {
    const std::string deeper = path + "/" + sub->get_name();
    text += "      " + deeper + ") place=" + deeper + " ;;\n";
    text += steps(*sub, deeper);
  }
  std::string with_value;
  for (const auto* option : command.get_options()) {
    if (!takes_value(*option)) continue;
    for (const auto& name : spellings(*option)) {
      with_value += (with_value.empty() ? "" : "|") + path + "/" + name;
    }
  }
  if (!with_value.empty())
    text += "      " + with_value + ") expected=value ;;\n";
  if (command.get_prefix_command() && !path.empty()) {
    text +=
        "      " + path + "/-*) ;;\n      " + path + "/*) place=program ;;\n";
  }
  return text;
}

// Returns the branches that say what may come next.
std::string offers(const CLI::App& command, const std::string& path) {
  std::string words;
  for (const auto* sub : subcommands(command)) words += sub->get_name() + " ";
  for (const auto* option : command.get_options()) {
    for (const auto& name : spellings(*option)) {
      if (name.find('_') == std::string::npos) words += name + " ";
    }
  }
  if (words.empty()) {
    // The command is a program of its own, which knows its options.
    words = "$(\"${COMP_WORDS[0]}\" " + command.get_name() +
            " --help 2>/dev/null | grep -oE -- '--[a-z][a-z-]*')";
  }
  std::string text = "    \"" + path + "\") words=\"" + words + "\" ;;\n";
  for (const auto* sub : subcommands(command)) {
    text += offers(*sub, path + "/" + sub->get_name());
  }
  return text;
}

std::string bash_script(const CLI::App& app) {
  return kBegin + steps(app, "") + kMiddle + offers(app, "") + kEnd;
}

}  // namespace

void add_completion_command(CLI::App& app) {
  CLI::App* completion = add_command(
      app, "completion", "Print a script that completes commands in a shell",
      "lockstep completion bash|zsh\n"
      "  In ~/.bashrc or ~/.zshrc: source <(lockstep completion bash)");
  completion->require_subcommand(1);
  completion->add_subcommand("bash", "For bash")->callback([&app] {
    std::cout << bash_script(app);
  });
  completion->add_subcommand("zsh", "For zsh, by its bashcompinit")
      ->callback([&app] {
        std::cout << "(( $+functions[compdef] )) || "
                     "{ autoload -Uz compinit; compinit; }\n"
                     "autoload -Uz bashcompinit; bashcompinit\n"
                  << bash_script(app);
      });
}

}  // namespace lockstep::internal
