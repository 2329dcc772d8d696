#include "lockstep/cli/command_line.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <iostream>
#include <memory>
#include <utility>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/base/shown_text.h"

namespace lockstep::internal {
namespace {

constexpr int kStderrAllowance = 1000;  // milliseconds
// As kSystemError; the programs that link LibTorch do not see its header.
constexpr int kOutputLost = 1;

std::string spellings(const std::string& name, const std::string& short_name) {
  std::string all = short_name.empty() ? name : short_name + "," + name;
  std::string underscored = name;
  std::replace(underscored.begin() + 2, underscored.end(), '-', '_');
  if (underscored != name) all += "," + underscored;
  return all;
}

class HelpFormatter : public CLI::Formatter {
 public:
  explicit HelpFormatter(std::string usage) : usage_(std::move(usage)) {
    column_width(34);
  }

  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: " + usage_ + "\n";
  }

  std::string make_option_name(const CLI::Option* option,
                               bool is_positional) const override {
    if (is_positional) return option->get_name(true);
    std::string names;
    for (const auto& name : option->get_snames()) names += "-" + name + ", ";
    for (const auto& name : option->get_lnames()) {
      if (name.find('_') == std::string::npos) names += "--" + name + ", ";
    }
    return names.substr(0, names.size() - 2);
  }

  // CLI11 would add the type and the environment variable of each option.
  std::string make_option_opts(const CLI::Option* option) const override {
    return option->get_type_size() == 0 ? "" : " " + option->get_type_name();
  }

 private:
  std::string usage_;
};

}  // namespace

CLI::Option* add_spelled_option(CLI::App& app, const std::string& name,
                                std::string& value,
                                const std::string& description,
                                const std::string& short_name) {
  // If an option is given twice, the last one counts, as in argparse.
  return app.add_option(spellings(name, short_name), value, description)
      ->envname(environment_name(name))
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
      ->type_name("VALUE");
}

CLI::Option* add_spelled_flag(CLI::App& app, const std::string& name,
                              bool& value, const std::string& description,
                              const std::string& short_name) {
  return app.add_flag(spellings(name, short_name), value, description)
      ->envname(environment_name(name))
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

std::string environment_name(std::string_view option) {
  std::string name = "PET_";
  for (const char c : option.substr(2)) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(c));
  }
  return name;
}

bool takes_value(const CLI::Option& option) {
  return !option.get_positional() && option.get_items_expected_max() > 0;
}

std::vector<std::string> separate_values(const CLI::App& app,
                                         std::vector<std::string> arguments) {
  const CLI::App* command = &app;
  std::vector<std::string> separated;
  size_t at = 0;
  for (; at < arguments.size(); ++at) {
    const std::string& argument = arguments[at];
    if (argument == "--") break;
    if (!argument.starts_with('-')) {
      const auto subs = command->get_subcommands(
          [&](const CLI::App* sub) { return sub->get_name() == argument; });
      if (!subs.empty()) {
        command = subs.front();
      } else if (command->get_prefix_command()) {
        break;  // the program, whose arguments are its own
      }
      separated.push_back(argument);
      continue;
    }
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const bool is_short = !argument.starts_with("--");
    const CLI::Option* option = command->get_option_no_throw(name);
    if (option == nullptr) {
      separated.push_back(argument);
      continue;
    }
    if (equals == std::string::npos) {
      separated.push_back(argument);
      if (takes_value(*option) && at + 1 < arguments.size()) {
        separated.push_back(arguments[++at]);
      }
    } else if (!takes_value(*option) && equals + 1 < argument.size()) {
      separated.push_back(argument);
    } else if (!takes_value(*option)) {
      throw CLI::ArgumentMismatch(
          name + " is a flag, and \"" + argument +
          "\" gives it an empty value; leave the = out");
    } else if (equals + 1 == argument.size() || is_short) {
      separated.push_back(name);
      separated.push_back(argument.substr(equals + 1));
    } else {
      separated.push_back(argument);
    }
  }
  separated.insert(separated.end(), arguments.begin() + static_cast<long>(at),
                   arguments.end());
  return separated;
}

std::shared_ptr<CLI::Formatter> make_help_formatter(const std::string& usage) {
  return std::make_shared<HelpFormatter>(usage);
}

CLI::App* add_command(CLI::App& parent, const std::string& name,
                      const std::string& description,
                      const std::string& usage) {
  CLI::App* command = parent.add_subcommand(name, description);
  // `lockstep run` takes all arguments after its program as they are, and
  // commands that are added after it inherit that.
  command->prefix_command(false);
  command->formatter(make_help_formatter(usage));
  command->get_help_ptr()->description("Print this help and exit");
  return command;
}

void write_output(std::string_view text) {
  std::cout << shown_text(text) << std::flush;
}

int end_output(std::string_view name, int exit_code) {
  const bool is_whole =
      std::cout.flush() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (is_whole) return exit_code;
  write_message(name,
                "its output could not be written; the disk that it goes to may "
                "be full, or "
                "its reader may have gone");
  return exit_code != 0 ? exit_code : kOutputLost;
}

void write_message(std::string_view name, std::string_view text) {
  std::string line(name);
  line += ": ";
  line += shown_text(text);
  line += '\n';
  std::string_view rest = line;
  const FileDescriptor terminal = open_terminal_of(STDERR_FILENO);
  const int fd = terminal ? terminal.get() : STDERR_FILENO;
  while (!rest.empty()) {
    pollfd entry{fd, POLLOUT, 0};
    if (poll(&entry, 1, kStderrAllowance) <= 0) return;
    const ssize_t count =
        write(fd, rest.data(), std::min<size_t>(rest.size(), PIPE_BUF));
    if (count <= 0) return;
    rest.remove_prefix(static_cast<size_t>(count));
  }
}

}  // namespace lockstep::internal
