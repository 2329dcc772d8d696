#include "lockstep/launch/nodes/store/key_table.h"

namespace lockstep::internal {
namespace {

// The memory that an entry takes besides its texts.
constexpr size_t kEntryBytes = 128;

Reply refusal(const char* why) {
  return {.kind = Reply::Kind::refused, .text = why};
}

Reply of_text(const std::string& text) {
  if (text.empty()) return {};
  return {.kind = Reply::Kind::text, .text = text};
}

}  // namespace

int64_t KeyTable::last_change_of(const std::string& key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? 0 : found->second.changed;
}

KeyTable::Entry* KeyTable::entry_for(const std::string& key,
                                     size_t value_bytes) {
  const auto found = entries_.find(key);
  const bool is_new = found == entries_.end();
  const size_t before = is_new ? 0 : found->second.value.size();
  const size_t after =
      bytes_ - before + value_bytes + (is_new ? key.size() + kEntryBytes : 0);
  if (after > most_bytes_) return nullptr;
  bytes_ = after;
  return is_new ? &entries_[key] : &found->second;
}

Reply KeyTable::store(const Request& request) {
  if (request.value.empty()) return refusal("an empty value cannot be set");
  Entry* entry = entry_for(request.key, request.value.size());
  if (entry == nullptr) return refusal("the agents' store is full");
  entry->value = request.value;
  note_change(*entry);
  return {};
}

Reply KeyTable::count(const Request& request) {
  const auto found = entries_.find(request.key);
  if (request.number == 0) {
    const int64_t sum = found == entries_.end() ? 0 : found->second.counter;
    return {.kind = Reply::Kind::number, .number = sum};
  }
  Entry* entry = entry_for(
      request.key, found == entries_.end() ? 0 : found->second.value.size());
  if (entry == nullptr) return refusal("the agents' store is full");
  // Wraps around, where a signed sum would be undefined.
  entry->counter = static_cast<int64_t>(static_cast<uint64_t>(entry->counter) +
                                        static_cast<uint64_t>(request.number));
  note_change(*entry);
  return {.kind = Reply::Kind::number, .number = entry->counter};
}

Reply KeyTable::apply(const Request& request) {
  const auto found = entries_.find(request.key);
  const bool is_set = found != entries_.end() && !found->second.value.empty();
  switch (request.operation) {
    case Request::Operation::set:
      return store(request);
    case Request::Operation::get:
      return is_set ? of_text(found->second.value) : Reply{};
    case Request::Operation::add:
      return count(request);
    case Request::Operation::remove:
      if (is_set) {
        bytes_ -= found->second.value.size();
        found->second.value.clear();
        note_change(found->second);
      }
      return {};
    case Request::Operation::set_if_absent: {
      if (is_set) return of_text(found->second.value);
      const Reply stored = store(request);
      return stored.kind == Reply::Kind::refused ? stored
                                                 : of_text(request.value);
    }
    case Request::Operation::hello:
    case Request::Operation::await_change:
    case Request::Operation::for_round:
    case Request::Operation::worker_call:
    case Request::Operation::worker_gone:
    case Request::Operation::session:
      break;
  }
  return refusal("this request is not about one key");
}

}  // namespace lockstep::internal
