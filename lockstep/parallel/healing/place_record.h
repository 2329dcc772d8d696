#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/base/file_descriptor.h"

namespace lockstep::internal {

// The records that a rank keeps in the memory of its place
// (worker/healing_place.h) for the process that may take this place: state
// that no other rank has, as it was after a number of steps. The last records
// are kept, so that at every moment, also if the process dies while it writes,
// all but one of the slots are whole. For one thread.
//
// The file is sparse: slot n begins at n * 2^40 bytes, and has as much memory
// as the largest record that was written into it. So several of these objects
// share a file, each with slots of its own.
class PlaceRecord {
 public:
  // Uses the slots from `first` on. `memory` must outlive this object. Throws
  // std::system_error.
  PlaceRecord(const FileDescriptor& memory, size_t first, size_t slots);
  PlaceRecord(const PlaceRecord&) = delete;
  PlaceRecord& operator=(const PlaceRecord&) = delete;
  ~PlaceRecord();

  using Bytes = std::span<const std::byte>;
  // Writes a record of the state after `steps` steps, in the place of the
  // oldest one. Blocks for nothing but the copy. Throws std::system_error if
  // the slot must grow and the system lacks the memory.
  void write(int64_t steps, std::span<const Bytes> parts);

  // Returns the last whole record of the state after `steps` steps; nothing if
  // there is none. The bytes stay valid until the next call. Throws
  // std::runtime_error if they are not those that were written.
  std::optional<Bytes> read(int64_t steps);

  // Returns the numbers of steps of all whole records, in any order.
  std::vector<int64_t> steps() const;

  // Returns the whole records from number `after` + 1 on, in the order in which
  // they were written. They are numbered from 1 on. The bytes stay valid until
  // one is written.
  struct Record {
    uint64_t number;
    int64_t steps;
    Bytes bytes;
  };
  std::vector<Record> written_after(uint64_t after);

  // Forgets the records of states after more than `steps` steps, or all.
  void forget_after(int64_t steps);
  void forget_all();

  size_t slots() const { return mappings_.size(); }

 private:
  struct Slot;
  struct Mapping {
    std::byte* data = nullptr;
    size_t bytes = 0;
  };

  Slot& slot(size_t index) const;
  // Maps at least so many bytes of the slot.
  void map(size_t index, size_t bytes);

  const FileDescriptor& memory_;
  const size_t first_;
  std::vector<Mapping> mappings_;
};

}  // namespace lockstep::internal
