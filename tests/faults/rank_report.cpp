#include "tests/faults/rank_report.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <cstdlib>

namespace lockstep::internal::testing {

int own_rank() {
  static const int own = std::stoi(std::getenv("RANK"));
  return own;
}

void say(const char* what, const std::string& more) {
  std::printf("%s %d%s%s\n", what, own_rank(), more.empty() ? "" : " ",
              more.c_str());
  std::fflush(stdout);
}

std::string one_line(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch ? torch->what_without_backtrace() : error.what();
  for (size_t at; (at = text.find('\n')) != text.npos;) {
    text.replace(at, 1, " | ");
  }
  return text;
}

Arguments::Arguments(const std::vector<std::string>& given) {
  for (const auto& argument : given) {
    const auto equals = argument.find('=');
    values_[argument.substr(0, equals)] =
        std::stoi(argument.substr(equals + 1));
  }
}

int Arguments::get(const std::string& name, int otherwise) const {
  const auto found = values_.find(name);
  return found == values_.end() ? otherwise : found->second;
}

}  // namespace lockstep::internal::testing

int main(int argc, char** argv) {
  return lockstep::internal::testing::run(
      argv[1], argv[2],
      lockstep::internal::testing::Arguments({argv + 3, argv + argc}));
}
