#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "lockstep/checkpoint/snapshot.h"

namespace lockstep::internal {

// Throws std::invalid_argument if `text` is not UTF-8, as which Python reads
// the names of every format.
inline void require_utf8(const std::string& text) {
  try {
    (void)nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw std::invalid_argument(
        "a name or metadata of this snapshot is not UTF-8; rename it");
  }
}

inline void require_utf8(const SamplerState& sampler_state,
                         const std::map<std::string, std::string>& metadata) {
  for (const auto& [name, value] : sampler_state) require_utf8(name);
  for (const auto& [name, value] : metadata) {
    require_utf8(name);
    require_utf8(value);
  }
}

}  // namespace lockstep::internal
