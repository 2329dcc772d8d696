#include "lockstep/checkpoint/renaming.h"

#include <map>
#include <stdexcept>

namespace lockstep::internal {

Renaming::Renaming(Prefixes prefixes) {
  function_ = [prefixes = std::move(prefixes)](const std::string& name) {
    for (const auto& [from, to] : prefixes) {
      if (name.starts_with(from)) return to + name.substr(from.size());
    }
    return name;
  };
}

NamedTensors Renaming::apply(NamedTensors tensors) const {
  if (!function_) return tensors;
  std::map<std::string, std::string> before;  // by the new name
  for (auto& [name, tensor] : tensors) {
    std::string renamed = function_(name);
    const auto [other, is_new] = before.emplace(renamed, name);
    if (!is_new) {
      throw std::invalid_argument(
          "rename makes \"" + renamed + "\" of both \"" + other->second +
          "\" and \"" + name + "\"; give each tensor a name of its own");
    }
    name = std::move(renamed);
  }
  return tensors;
}

}  // namespace lockstep::internal
