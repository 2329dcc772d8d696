#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// Adds an option with a value under the spellings that torchrun knows:
// "--nproc-per-node" also as --nproc_per_node, and its default from the
// environment, PET_NPROC_PER_NODE. `short_name` is "-r" or empty. The value
// stays text; whoever takes it checks it and says what is allowed.
CLI::Option* add_spelled_option(CLI::App& app, const std::string& name,
                                std::string& value,
                                const std::string& description,
                                const std::string& short_name = "");

// The same for a flag: set where the environment says a number but 0.
CLI::Option* add_spelled_flag(CLI::App& app, const std::string& name,
                              bool& value, const std::string& description,
                              const std::string& short_name = "");

// The environment variable that sets `option`: "--log-dir" gives PET_LOG_DIR.
std::string environment_name(std::string_view option);

// "--nproc_per_node=2" and "--nproc-per-node" as "--nproc-per-node".
std::string canonical_option(std::string_view argument);

bool takes_value(const CLI::Option& option);

// Returns the arguments after the program's name with each "--option=" as the
// two words "--option" and "", and so for "-r=3", as argparse takes them: CLI11
// would take the next argument for the value that is missing. Looks no further
// than to "--" and to what belongs to another program. Throws
// CLI::ArgumentMismatch for a flag with an empty value.
std::vector<std::string> separate_values(const CLI::App& app,
                                         std::vector<std::string> arguments);

// Help that shows one spelling of each option and the usage given here.
std::shared_ptr<CLI::Formatter> make_help_formatter(const std::string& usage);

// Writes "<name>: <text>" and a newline to stderr at once. Gives up after 1 s
// on a reader that takes nothing: the launcher's signals must not wait for it.
void write_message(std::string_view name, std::string_view text);

}  // namespace lockstep
