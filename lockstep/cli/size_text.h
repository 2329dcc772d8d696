#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace lockstep::internal {

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

}  // namespace lockstep::internal
