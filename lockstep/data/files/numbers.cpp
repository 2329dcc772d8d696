#include "lockstep/data/files/numbers.h"

#include <locale.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <new>
#include <string>
#include <system_error>

namespace lockstep::internal {
namespace {

std::string_view without_blanks(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// from_chars takes a minus, but no plus.
std::string_view without_plus(std::string_view text) {
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') {
    text.remove_prefix(1);
  }
  return text;
}

// Reads a number of which from_chars says only that no double is near it.
double too_large_or_small(std::string_view text) {
  static const locale_t plain = ::newlocale(LC_ALL_MASK, "C", locale_t{});
  if (!plain) throw std::bad_alloc();
  return ::strtod_l(std::string(text).c_str(), nullptr, plain);
}

}  // namespace

Parsed parse_double(std::string_view text, double& value) {
  text = without_plus(without_blanks(text));
  double parsed = 0;
  const char* begin = text.data();
  const char* end = begin + text.size();
  const auto [rest, error] = std::from_chars(begin, end, parsed);
  if (error == std::errc::invalid_argument || rest != end) {
    return Parsed::not_a_number;
  }
  if (error == std::errc::result_out_of_range) {
    parsed = too_large_or_small(text);
    if (std::isinf(parsed)) return Parsed::out_of_range;
  }
  value = parsed;
  return Parsed::ok;
}

Parsed parse_int64(std::string_view text, int64_t& value) {
  text = without_plus(without_blanks(text));
  int64_t parsed = 0;
  const char* begin = text.data();
  const char* end = begin + text.size();
  const auto [rest, error] = std::from_chars(begin, end, parsed);
  if (error == std::errc::invalid_argument || rest != end) {
    return Parsed::not_a_number;
  }
  if (error == std::errc::result_out_of_range) return Parsed::out_of_range;
  value = parsed;
  return Parsed::ok;
}

}  // namespace lockstep::internal
