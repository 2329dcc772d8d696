#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/state/state_tree.h"

namespace lockstep {

// The state of a GradScaler: that of torch.amp.GradScaler with the same names,
// except for `growth_tracker`, which Python calls `_growth_tracker`.
struct GradScalerState {
  double scale{65536.0};
  double growth_factor{2.0};
  double backoff_factor{0.5};
  int64_t growth_interval{2000};
  // Steps without infinity or NaN since the scale last changed.
  int64_t growth_tracker{0};

  bool operator==(const GradScalerState&) const = default;
};

// Converts the state to one line of JSON, for the metadata of a snapshot, and
// back; the numbers that are read are the same bit by bit. The JSON is what
// Python's json.dumps(scaler.state_dict()) writes, and JSON from there can be
// read.
//
// Both throw std::invalid_argument: to_json() for a number that is not finite,
// which JSON does not have; grad_scaler_state_from_json() for text that is not
// such an object, with the entry that is missing or wrong. Other entries are
// ignored.
//
// to_state_tree() and from_state_tree() are for a scaler among the items of a
// TrainingState; the second throws as grad_scaler_state_from_json() does.
StateTree to_state_tree(const GradScalerState& state);
void from_state_tree(const StateTree& tree, GradScalerState& state);
std::string to_json(const GradScalerState& state);
GradScalerState grad_scaler_state_from_json(std::string_view text);

}  // namespace lockstep
