#pragma once

#include <chrono>
#include <cstdio>
#include <string>

namespace lockstep::internal {

// Returns "0.5 s": a time as the launcher's messages write it.
inline std::string seconds_text(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s",
                static_cast<double>(time.count()) / 1000);
  return text;
}

}  // namespace lockstep::internal
