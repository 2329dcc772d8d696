#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

namespace lockstep::internal {

// Returns the number that a state dict has under `name`. Throws
// std::invalid_argument, which names the class `owner`, if it has none.
inline int64_t state_entry(const std::map<std::string, int64_t>& state,
                           const std::string& name, const std::string& owner) {
  const auto found = state.find(name);
  if (found != state.end()) return found->second;
  throw std::invalid_argument(owner + ": the state has no entry \"" + name +
                              "\"; load what the state_dict() of a " + owner +
                              " returned");
}

}  // namespace lockstep::internal
