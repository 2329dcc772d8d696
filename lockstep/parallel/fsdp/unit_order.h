#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/state/digest.h"

namespace lockstep::internal {

// The order in which a rank has gathered and reduced units. Collectives of
// units that have equal sizes fit each other, so if ranks go through units in
// different orders, nothing else notices that a rank got the elements of
// another unit. Nor does it if ranks reduce the gradients of different
// parameters, because one that is missing counts as 0.
//
// Threads: one at a time.
class UnitOrder {
 public:
  enum class Act : uint8_t { gather, reduce, gave_up };
  // `unit` is a number that is the same on all ranks, `part` that of one of its
  // FlatParameters, `trained` what FlatParameters::trained() returns.
  void note(Act act, size_t unit, size_t part = 0,
            const std::string& trained = {});
  // Forgets what was noted.
  void clear();

  // Collective: an Agreement (16 bytes) that tells `bits`, if all ranks of
  // `group` have noted the same since the last call. Otherwise returns on all
  // ranks which two differ, and where. `unit_name` names a unit by its number.
  // Forgets what was noted. `bits`, as many on all ranks, become those that any
  // rank has set.
  std::optional<std::string> difference(
      const ProcessGroupPtr& group,
      const std::function<std::string(size_t)>& unit_name,
      std::vector<int64_t>& bits);

 private:
  struct Noted {
    Act act;
    size_t unit;
    size_t part;
    std::string trained;
  };
  int64_t count_ = 0;
  Digest digest_;
  std::deque<Noted> last_;  // for the error
};

}  // namespace lockstep::internal
