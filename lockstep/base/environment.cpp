#include "lockstep/base/environment.h"

#include <limits.h>
#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <stdexcept>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {
namespace {

// How many forks lie between the start of the program and this process.
std::atomic<uint64_t> forks{0};

void count_in_child() { forks.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

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

std::string stripped(std::string_view text) {
  constexpr std::string_view kWhite = " \t\r\n\v\f";
  const size_t begin = text.find_first_not_of(kWhite);
  if (begin == text.npos) return "";
  return std::string(
      text.substr(begin, text.find_last_not_of(kWhite) - begin + 1));
}

std::string host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name[0] == '\0' ? "localhost" : name.data();
}

std::string random_digits(size_t count) {
  std::array<unsigned char, 256> bytes;  // getrandom() gives these at once
  if (::getrandom(bytes.data(), count / 2, 0) !=
      static_cast<ssize_t>(count / 2)) {
    throw_errno("getrandom");
  }
  std::string text;
  for (size_t i = 0; i < count / 2; ++i) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += {kDigits[bytes[i] >> 4], kDigits[bytes[i] & 15]};
  }
  return text;
}

bool is_same_secret(std::string_view one, std::string_view other) {
  if (one.size() != other.size()) return false;
  unsigned difference = 0;
  for (size_t at = 0; at < one.size(); ++at) {
    difference |= static_cast<unsigned char>(one[at] ^ other[at]);
  }
  return difference == 0;
}

ProcessMark::ProcessMark() {
  [[maybe_unused]] static const int registered =
      ::pthread_atfork(nullptr, nullptr, count_in_child);
  forks_ = forks.load(std::memory_order_relaxed);
}

bool ProcessMark::is_foreign() const noexcept {
  return forks.load(std::memory_order_relaxed) != forks_;
}

}  // namespace lockstep::internal
