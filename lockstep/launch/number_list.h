#pragma once

#include <string>
#include <vector>

namespace lockstep::internal {

// Returns "node 1" or "nodes 1, 3 and 4": numbers as the launcher's messages
// write them.
inline std::string name_numbers(const std::string& kind,
                                const std::vector<int>& numbers) {
  std::string text = kind + (numbers.size() == 1 ? " " : "s ");
  for (size_t at = 0; at < numbers.size(); ++at) {
    if (at > 0) text += at + 1 == numbers.size() ? " and " : ", ";
    text += std::to_string(numbers[at]);
  }
  return text;
}

}  // namespace lockstep::internal
