#include "lockstep/cli/command_line.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <utility>

namespace lockstep {
namespace {

constexpr int kStderrAllowance = 1000;  // milliseconds

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

  // CLI11 would add the type and the environment variable of each.
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
  // Given twice, the last counts, as in argparse.
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

std::string canonical_option(std::string_view argument) {
  std::string name(argument.substr(0, argument.find('=')));
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

std::shared_ptr<CLI::Formatter> make_help_formatter(const std::string& usage) {
  return std::make_shared<HelpFormatter>(usage);
}

void write_message(std::string_view name, std::string_view text) {
  std::string line(name);
  line += ": ";
  line += text;
  line += '\n';
  std::string_view rest = line;
  while (!rest.empty()) {
    pollfd entry{STDERR_FILENO, POLLOUT, 0};
    if (poll(&entry, 1, kStderrAllowance) <= 0) return;
    const ssize_t count = write(STDERR_FILENO, rest.data(),
                                std::min<size_t>(rest.size(), PIPE_BUF));
    if (count <= 0) return;
    rest.remove_prefix(static_cast<size_t>(count));
  }
}

}  // namespace lockstep
