#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep {

// What GradScaler::state_dict() is: torch.amp.GradScaler's, under its names
// but for `growth_tracker`, which has an underscore there.
struct GradScalerState {
  double scale{65536.0};
  double growth_factor{2.0};
  double backoff_factor{0.5};
  int64_t growth_interval{2000};
  // Steps without infinity or NaN since the scale last changed.
  int64_t growth_tracker{0};

  bool operator==(const GradScalerState&) const = default;
};

// The state as one line of JSON, for the metadata of a snapshot; reading it
// gives the same numbers, bit by bit. It is what Python's
// json.dumps(scaler.state_dict()) means, and is read from there.
//
// Both throw std::invalid_argument: for a number that is not finite, which JSON
// does not have; reading, for text that is no such object, saying which entry
// is missing or wrong. Other entries are ignored.
std::string to_json(const GradScalerState& state);
GradScalerState grad_scaler_state_from_json(std::string_view text);

}  // namespace lockstep
