#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "lockstep/launch/nodes/store/store_message.h"

namespace lockstep::internal {

// The keys of the agents' store, with their values and counters. Each change
// has a number, one more than the change before, so that an agent can ask what
// has changed since. For one thread.
class KeyTable {
 public:
  // About how many bytes all keys and values may take. Enough for the records
  // of a thousand nodes over a thousand restarts.
  static constexpr size_t kMostBytes = 256 << 20;

  explicit KeyTable(size_t most_bytes = kMostBytes) : most_bytes_(most_bytes) {}

  // Does what `request` asks, which must be an operation on one key. Refuses a
  // value that is empty, and what would take more than the bytes allowed.
  Reply apply(const Request& request);

  // Returns the number of the last change, of any key; 0 if there was none.
  int64_t last_change() const { return last_change_; }
  // Returns the number of the last change of `key`; 0 if there was none.
  int64_t last_change_of(const std::string& key) const;

 private:
  // A key that was removed stays, as agents may ask when it has changed.
  struct Entry {
    std::string value{};  // empty if the key is not set
    int64_t counter = 0;
    int64_t changed = 0;
  };

  Reply store(const Request& request);
  Reply count(const Request& request);
  // Returns nullptr if there is no room for `key` and `value`.
  Entry* entry_for(const std::string& key, size_t value_bytes);
  void note_change(Entry& entry) { entry.changed = ++last_change_; }

  size_t most_bytes_;
  size_t bytes_ = 0;
  int64_t last_change_ = 0;
  std::unordered_map<std::string, Entry> entries_;
};

}  // namespace lockstep::internal
