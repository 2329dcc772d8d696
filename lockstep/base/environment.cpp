#include "lockstep/base/environment.h"

#include <limits.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <stdexcept>

namespace lockstep::internal {

std::optional<std::string> get_env(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<int64_t> get_env_int(const char* name, int64_t lowest,
                                   int64_t highest) {
  auto value = get_env(name);
  if (!value) return std::nullopt;
  return parse_int(std::string("environment variable ") + name, *value, lowest,
                   highest);
}

int64_t parse_int(std::string_view what, std::string_view text, int64_t lowest,
                  int64_t highest) {
  int64_t number = 0;
  auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() ||
      number < lowest || number > highest) {
    throw std::invalid_argument(
        std::string(what) + " is \"" + std::string(text) +
        "\"; allowed is a whole number from " + std::to_string(lowest) +
        " to " + std::to_string(highest));
  }
  return number;
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name[0] == '\0' ? "localhost" : name.data();
}

}  // namespace lockstep::internal
