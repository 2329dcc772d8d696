#pragma once

#include <string_view>

namespace lockstep::internal {

// How an error says of another rank that it has ended: "rank 1 died", "rank 1
// failed: ..." with that rank's own words. The launcher finds by these words
// which ranks an error names (ranks_named_in()).
struct EndingWords {
  static constexpr std::string_view died = "died";
  static constexpr std::string_view left = "has left the group";
  static constexpr std::string_view left_in_error = "left because of an error";
  static constexpr std::string_view failed = "failed:";

  static constexpr std::string_view all[] = {died, left, left_in_error, failed};
};

}  // namespace lockstep::internal
