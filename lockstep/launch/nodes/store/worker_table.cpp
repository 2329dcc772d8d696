#include "lockstep/launch/nodes/store/worker_table.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace lockstep::internal {
namespace {

using Kind = WorkerReply::Kind;
using Operation = WorkerCall::Operation;

// The memory that a key takes besides its texts.
constexpr size_t kBytesOfKey = 128;
// The memory that a wait for a key takes besides two copies of the key.
constexpr size_t kBytesOfWait = 320;

size_t bytes_of_wait(const std::string& key) {
  return 2 * key.size() + kBytesOfWait;
}

WorkerReply worker_refusal(std::string why) {
  return {.kind = Kind::refused, .text = std::move(why)};
}

WorkerReply full() {
  return worker_refusal("the store of the workers is full");
}

WorkerReply of_value(const std::string& value) {
  return {.kind = Kind::value, .text = value};
}

WorkerReply of_number(int64_t number) {
  return {.kind = Kind::number, .number = number};
}

std::optional<int64_t> parse_sum(const std::string& text) {
  int64_t sum = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, sum);
  if (error != std::errc{} || at != end) return std::nullopt;
  return sum;
}

}  // namespace

std::vector<WorkerTable::Answer> WorkerTable::ask(const Asker& asker,
                                                  const WorkerCall& call) {
  std::vector<Answer> answers;
  // A connection has one call at a time: what comes while it waits ends the
  // wait.
  if (missing_.contains(asker)) {
    end_wait(asker);
    answers.push_back({asker, {.kind = Kind::ended}});
  }
  if (call.operation == Operation::wait && !are_there(call.keys)) {
    if (!begin_wait(asker, call)) answers.push_back({asker, full()});
    return answers;
  }
  appeared_.reset();
  answers.push_back({asker, reply_to(asker, call)});
  if (appeared_) tell_waiters(*appeared_, answers);
  return answers;
}

WorkerReply WorkerTable::reply_to(const Asker& asker, const WorkerCall& call) {
  const auto found = values_.find(call.key);
  switch (call.operation) {
    case Operation::set:
      return store(call.key, call.value) ? WorkerReply{} : full();
    case Operation::get:
      if (found == values_.end()) return {.kind = Kind::absent};
      return of_value(found->second);
    case Operation::add:
      return add(call);
    case Operation::compare_set:
      return compare_set(call);
    case Operation::remove:
      if (found == values_.end()) return of_number(0);
      bytes_ -= found->first.size() + found->second.size() + kBytesOfKey;
      values_.erase(found);
      return of_number(1);
    case Operation::check:
      return {.kind = are_there(call.keys) ? Kind::done : Kind::absent};
    case Operation::wait:
      return {};
    case Operation::count_keys:
      return of_number(static_cast<int64_t>(values_.size()));
    case Operation::append: {
      std::string value =
          found == values_.end() ? call.value : found->second + call.value;
      const auto size = static_cast<int64_t>(value.size());
      if (value.size() > kMostWorkerValueBytes) {
        return worker_refusal("the value would have " + std::to_string(size) +
                              " bytes; allowed are " +
                              std::to_string(kMostWorkerValueBytes));
      }
      return store(call.key, std::move(value)) ? of_number(size) : full();
    }
    case Operation::claim:
      return claim(asker, call);
  }
  return worker_refusal("there is no such operation");
}

WorkerReply WorkerTable::add(const WorkerCall& call) {
  const auto found = values_.find(call.key);
  std::optional<int64_t> sum = 0;
  if (found != values_.end()) sum = parse_sum(found->second);
  if (!sum) return worker_refusal("add: the key holds a text, not a number");
  // Wraps around, where a signed sum would be undefined.
  sum = static_cast<int64_t>(static_cast<uint64_t>(*sum) +
                             static_cast<uint64_t>(call.number));
  return store(call.key, std::to_string(*sum)) ? of_number(*sum) : full();
}

WorkerReply WorkerTable::compare_set(const WorkerCall& call) {
  const auto found = values_.find(call.key);
  if (found == values_.end()) {
    // As in TCPStore: the caller learns that nothing was set because it gets
    // back what it expected.
    if (!call.expected.empty()) return of_value(call.expected);
  } else if (found->second != call.expected) {
    return of_value(found->second);
  }
  return store(call.key, call.value) ? of_value(call.value) : full();
}

WorkerReply WorkerTable::claim(const Asker& asker, const WorkerCall& call) {
  auto found = places_.find(call.key);
  if (found == places_.end()) {
    if (!make_room(0, call.key.size() + kBytesOfKey + kMostWorkerKeyBytes)) {
      return full();
    }
    found = places_.emplace(call.key, Place{}).first;
  }
  Place& place = found->second;
  if (place.holder && place.name != call.value) {
    return {.kind = Kind::refused, .text = place.name, .number = place.count};
  }
  if (call.value.size() > kMostWorkerKeyBytes) {
    return worker_refusal("a name is too long");
  }
  place.holder = asker;
  place.name = call.value;
  return of_number(++place.count);
}

bool WorkerTable::make_room(size_t before, size_t after) {
  if (bytes_ - before + after > most_bytes_) return false;
  bytes_ = bytes_ - before + after;
  return true;
}

bool WorkerTable::store(const std::string& key, std::string value) {
  const auto found = values_.find(key);
  if (found != values_.end()) {
    if (!make_room(found->second.size(), value.size())) return false;
    found->second = std::move(value);
    return true;
  }
  if (!make_room(0, key.size() + value.size() + kBytesOfKey)) return false;
  values_.emplace(key, std::move(value));
  appeared_ = key;
  return true;
}

bool WorkerTable::are_there(const std::vector<std::string>& keys) const {
  return std::ranges::all_of(
      keys, [&](const std::string& key) { return values_.contains(key); });
}

bool WorkerTable::begin_wait(const Asker& asker, const WorkerCall& call) {
  std::set<std::string>& missing = missing_[asker];
  for (const std::string& key : call.keys) {
    if (values_.contains(key) || missing.contains(key)) continue;
    if (!make_room(0, bytes_of_wait(key))) {
      end_wait(asker);
      return false;
    }
    missing.insert(key);
    waiters_[key].insert(asker);
  }
  return true;
}

void WorkerTable::end_wait(const Asker& asker) {
  const auto wait = missing_.find(asker);
  if (wait == missing_.end()) return;
  for (const std::string& key : wait->second) {
    bytes_ -= bytes_of_wait(key);
    const auto found = waiters_.find(key);
    found->second.erase(asker);
    if (found->second.empty()) waiters_.erase(found);
  }
  missing_.erase(wait);
}

void WorkerTable::tell_waiters(const std::string& key,
                               std::vector<Answer>& answers) {
  const auto found = waiters_.find(key);
  if (found == waiters_.end()) return;
  const std::set<Asker> askers = std::move(found->second);
  waiters_.erase(found);
  for (const Asker& asker : askers) {
    const auto wait = missing_.find(asker);
    wait->second.erase(key);
    bytes_ -= bytes_of_wait(key);
    if (!wait->second.empty()) continue;
    missing_.erase(wait);
    answers.push_back({asker, {}});
  }
}

void WorkerTable::forget(const Asker& asker) {
  end_wait(asker);
  for (auto& [key, place] : places_) {
    if (place.holder == asker) place.holder.reset();
  }
}

void WorkerTable::forget_relay(uint64_t relay) {
  while (true) {
    const auto wait = missing_.lower_bound({relay, 0});
    if (wait == missing_.end() || wait->first.relay != relay) break;
    end_wait(Asker(wait->first));
  }
  for (auto& [key, place] : places_) {
    if (place.holder && place.holder->relay == relay) place.holder.reset();
  }
}

}  // namespace lockstep::internal
