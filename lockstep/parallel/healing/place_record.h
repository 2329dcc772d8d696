#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// The records that a rank keeps in the memory of its place
// (worker/healing_place.h) for the process that may take this place: the state
// that no other rank has, such as those of its random generators, as it was
// after a number of steps. The last records are kept, so that at every moment,
// also if the process dies while it writes, there is one of the step that it
// had begun last, and one of the step that it had computed last. For one
// thread.
class PlaceRecord {
 public:
  // Maps the memory and, if it is empty, makes room for records of up to
  // `most_bytes`. Throws std::system_error; std::runtime_error if the worker
  // before has left records of another size.
  PlaceRecord(const FileDescriptor& memory, size_t most_bytes);
  PlaceRecord(const PlaceRecord&) = delete;
  PlaceRecord& operator=(const PlaceRecord&) = delete;
  ~PlaceRecord();

  using Bytes = std::span<const std::byte>;
  // Writes a record of the state after `steps` steps, in the place of the
  // oldest one. `parts` together have at most `most_bytes`. Blocks for nothing
  // but the copy.
  void write(int64_t steps, std::span<const Bytes> parts);

  // Returns the last whole record of the state after `steps` steps; nothing if
  // there is none. The bytes stay valid until the next write().
  std::optional<Bytes> read(int64_t steps) const;

 private:
  struct Slot;

  Slot& slot(size_t index) const;

  size_t slot_bytes_ = 0;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace lockstep::internal
