#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace lockstep::internal {

// Returns what printf() would print, at most 511 characters.
template <typename... Values>
std::string format(const char* pattern, Values... values) {
  char text[512];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

// Returns the texts one after the other, with `between` between two of them.
inline std::string joined(const std::vector<std::string>& texts,
                          const std::string& between = " ") {
  std::string all;
  for (const auto& text : texts) all += (all.empty() ? "" : between) + text;
  return all;
}

// Returns a number of bytes as "64 KiB", "147 MiB" or "23.5 GiB".
inline std::string size_text(int64_t bytes) {
  const double mib = static_cast<double>(bytes) / (1 << 20);
  char text[48];
  if (bytes > 0 && mib < 1) {
    std::snprintf(text, sizeof text, "%.0f KiB", mib * 1024);
  } else if (mib < 10'000) {
    std::snprintf(text, sizeof text, "%.0f MiB", mib);
  } else {
    std::snprintf(text, sizeof text, "%.1f GiB", mib / 1024);
  }
  return text;
}

// Returns the table of `rows`, whose first is the header, as lines of text with
// columns of equal width, two blanks between them, and none at the end of a
// line. Every row has as many cells as the header. Columns in `right` are
// aligned to the right. Each line begins with `indent`.
std::string table_text(const std::vector<std::vector<std::string>>& rows,
                       const std::vector<size_t>& right = {},
                       const std::string& indent = "");

}  // namespace lockstep::internal
