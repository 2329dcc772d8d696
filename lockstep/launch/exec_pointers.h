#pragma once

#include <string>
#include <vector>

namespace lockstep {

// argv or envp for execve(): pointers into `strings`, which must live as long,
// and the null that ends them.
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

}  // namespace lockstep
