#pragma once

#include <cstdio>
#include <string>

namespace lockstep::internal {

// Returns what printf() would print, at most 511 characters.
template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[512];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

}  // namespace lockstep::internal
