#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal {

// Adds an option with a value under the spellings that torchrun knows:
// "--nproc-per-node" is also taken as --nproc_per_node, and its default from
// the environment variable PET_NPROC_PER_NODE. `short_name` is "-r" or empty.
// The value stays text; the caller must check it and say what is allowed.
CLI::Option* add_spelled_option(CLI::App& app, const std::string& name,
                                std::string& value,
                                const std::string& description,
                                const std::string& short_name = "");

// The same for a flag. The environment variable sets it by any number except 0.
CLI::Option* add_spelled_flag(CLI::App& app, const std::string& name,
                              bool& value, const std::string& description,
                              const std::string& short_name = "");

// Returns the environment variable that sets `option`: PET_LOG_DIR for
// "--log-dir".
std::string environment_name(std::string_view option);

bool takes_value(const CLI::Option& option);

// Returns `arguments`, those after the program's name, with each "--option=" as
// the two words "--option" and "", as argparse takes it, and "-r=3" as "-r" and
// "3": CLI11 would take the next argument for a value that is missing. Changes
// nothing from "--" on, or from what belongs to another program on. Throws
// CLI::ArgumentMismatch for a flag with an empty value.
std::vector<std::string> separate_values(const CLI::App& app,
                                         std::vector<std::string> arguments);

// Returns a formatter for help that shows `usage` and one spelling of each
// option.
std::shared_ptr<CLI::Formatter> make_help_formatter(const std::string& usage);

// Adds a command that takes no arguments but its own, unless the caller sets
// prefix_command(), with a help that begins with `usage`. `parent` owns it.
CLI::App* add_command(CLI::App& parent, const std::string& name,
                      const std::string& description, const std::string& usage);

// Writes the result of a command to stdout, by shown_text()
// (base/shown_text.h): it may hold what another user's job says.
void write_output(std::string_view text);

// Returns the exit code of a program that has written its output to stdout and
// would end with `exit_code`. It has failed if the output is not where it
// should be: a full disk shows when the last of it is written. Then this says
// so, under the program's `name`, and returns 1 instead of 0.
int end_output(std::string_view name, int exit_code);

// Writes "<name>: <text>" and a newline to stderr at once, by shown_text(),
// too. Gives up if the reader takes nothing for 1 s: the launcher's signals
// must not wait for it. (Only one of a terminal that this process may not open
// is awaited: open_terminal_of().)
void write_message(std::string_view name, std::string_view text);

}  // namespace lockstep::internal
