#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/base/file_descriptor.h"
#include "lockstep/parallel/healing/place_record.h"

namespace lockstep::internal {

// Copies of the records of each rank in the memory of a rank on another host,
// its *buddy*, for the case that its own host is lost. The buddy of a rank is
// the one with the same local rank on the next host; all hosts have equally
// many ranks. Both functions that are collective wait for the default group's
// timeout at most, and throw c10::DistError if a rank is lost. For one thread.
class BuddyCopies {
 public:
  // Keeps copies of another rank's records in slots of this rank's place, from
  // `first` on (place_record.h), as many as `own` has. Both references must
  // outlive this object. Throws std::system_error.
  BuddyCopies(PlaceRecord& own, const FileDescriptor& memory, size_t first);

  // Gives the buddy the records that were written since the last call, and
  // after start_again() all of them. Collective.
  void exchange();
  void start_again() { sent_.reset(); }

  // Gives each of the ranks `lost`, which have no records, those that its buddy
  // has; none if the buddy was lost, too. Collective.
  void give_back(const std::vector<int>& lost);

 private:
  PlaceRecord& own_;
  PlaceRecord copies_;
  // The number of the last record that the buddy has.
  std::optional<uint64_t> sent_{};
};

// Throws std::invalid_argument if the hosts of this job differ in their numbers
// of ranks.
void require_buddies();

}  // namespace lockstep::internal
