#pragma once

#include <string>
#include <vector>

namespace lockstep::internal {

// Returns argv or envp for execve(): pointers into `strings`, which must
// outlive them, and a null at the end.
inline std::vector<char*> exec_pointers(
    const std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (const auto& text : strings) {
    result.push_back(const_cast<char*>(text.c_str()));
  }
  result.push_back(nullptr);
  return result;
}

}  // namespace lockstep::internal
