#include "lockstep/parallel/mesh/ranks_text.h"

namespace lockstep::internal {

std::string ranks_text(const std::vector<int>& ranks) {
  constexpr size_t kMost = 8;
  constexpr size_t kFirst = 3;
  const bool all = ranks.size() <= kMost;
  std::string text = "{";
  for (size_t i = 0; i < (all ? ranks.size() : kFirst); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  if (all) return text + "}";
  return text + ", ..., " + std::to_string(ranks.back()) + "} (" +
         std::to_string(ranks.size()) + " ranks)";
}

}  // namespace lockstep::internal
