#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "lockstep/worker/worker_call.h"

namespace lockstep::internal {

// The keys of the workers' store in one attempt, and the calls that wait for
// keys. What the operations do is what c10d's TCPStore does (PyTorch 2.13). For
// one thread.
class WorkerTable {
 public:
  // About how many bytes all keys, values and waits may take.
  static constexpr size_t kMostBytes = 128 << 20;

  // A connection of a worker: its number at the agent of its node, and the
  // number of that agent's connection (0 if the agent keeps the table).
  struct Asker {
    uint64_t relay = 0;
    uint64_t worker = 0;

    auto operator<=>(const Asker&) const = default;
  };
  struct Answer {
    Asker to;
    WorkerReply reply;
  };

  explicit WorkerTable(size_t most_bytes = kMostBytes)
      : most_bytes_(most_bytes) {}

  // Does what `call` asks. Returns the reply to it, unless it waits now, and
  // the replies to the waits of others that it ends; those to one asker are in
  // order.
  std::vector<Answer> ask(const Asker& asker, const WorkerCall& call);
  // The connection is closed: its wait and its places end.
  void forget(const Asker& asker);
  // All connections of this relay are closed.
  void forget_relay(uint64_t relay);

 private:
  struct Place {
    int64_t count = 0;
    std::optional<Asker> holder{};
    std::string name{};
  };

  WorkerReply reply_to(const Asker& asker, const WorkerCall& call);
  WorkerReply add(const WorkerCall& call);
  WorkerReply compare_set(const WorkerCall& call);
  WorkerReply claim(const Asker& asker, const WorkerCall& call);
  // Returns false if there is no room.
  bool store(const std::string& key, std::string value);
  bool make_room(size_t before, size_t after);
  bool are_there(const std::vector<std::string>& keys) const;
  // Returns false, and begins none, if there is no room.
  bool begin_wait(const Asker& asker, const WorkerCall& call);
  void end_wait(const Asker& asker);
  // Appends the replies to the waits that `key` was the last to end.
  void tell_waiters(const std::string& key, std::vector<Answer>& answers);

  size_t most_bytes_;
  size_t bytes_ = 0;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, Place> places_;
  std::map<Asker, std::set<std::string>> missing_;            // of each wait
  std::unordered_map<std::string, std::set<Asker>> waiters_;  // by key
  // The key that the call under way has set, if it was absent before.
  std::optional<std::string> appeared_{};
};

}  // namespace lockstep::internal
