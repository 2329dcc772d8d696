#include "lockstep/base/shown_text.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace lockstep::internal {
namespace {

// A character and how many bytes it takes.
struct Character {
  uint32_t code;
  size_t bytes;
};

// Returns the first character of `text`; code 0 and one byte if it is not
// UTF-8, also if a shorter form of it exists or it is half of a pair of UTF-16.
Character first_of(std::string_view text) {
  constexpr Character kNone{0, 1};
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return {lead, 1};
  const size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return kNone;
  uint32_t code = lead & (0x7FU >> bytes);
  for (size_t at = 1; at < bytes; ++at) {
    const auto next = static_cast<unsigned char>(text[at]);
    if ((next & 0xC0U) != 0x80) return kNone;
    code = code << 6U | (next & 0x3FU);
  }
  constexpr uint32_t kSmallest[] = {0x80, 0x800, 0x10000};  // of 2 to 4 bytes
  if (code < kSmallest[bytes - 2] || code > 0x10FFFF ||
      (code >= 0xD800 && code < 0xE000)) {
    return kNone;
  }
  return {code, bytes};
}

bool is_shown(uint32_t code) {
  return code >= ' ' && !(code >= 0x7F && code < 0xA0) &&
         !(code >= 0x200E && code <= 0x200F) &&
         !(code >= 0x202A && code <= 0x202E) &&
         !(code >= 0x2066 && code <= 0x2069);
}

std::string shown(std::string_view text, std::string_view kept) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const Character next = first_of(text);
    const bool stays = is_shown(next.code) || kept.find(text[0]) != kept.npos;
    result += stays ? text.substr(0, next.bytes) : std::string_view(" ");
    text.remove_prefix(next.bytes);
  }
  return result;
}

}  // namespace

std::string shown_text(std::string_view text) { return shown(text, "\n\t"); }

std::string shown_line(std::string_view text) { return shown(text, ""); }

std::string shell_word(std::string_view text) {
  const auto is_plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("/._-+:@%").find(c) != std::string_view::npos;
  };
  if (!text.empty() && std::ranges::all_of(text, is_plain)) {
    return std::string(text);
  }
  const bool is_shown_as_it_is = shown_line(text) == text;
  std::string word = is_shown_as_it_is ? "'" : "$'";
  for (const char c : text) {
    if (is_shown_as_it_is) {
      word += c == '\'' ? std::string("'\\''") : std::string(1, c);
    } else if (is_plain(c) || c == ' ') {
      word += c;
    } else {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\x%02x",
                    static_cast<unsigned char>(c));
      word += escaped;
    }
  }
  return word + "'";
}

}  // namespace lockstep::internal
