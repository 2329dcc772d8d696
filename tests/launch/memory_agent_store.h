#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "lockstep/launch/nodes/agent_store.h"

namespace lockstep::internal::testing {

// The state that the connections of one job share.
struct StoredKeys {
  std::mutex mutex;
  std::map<std::string, std::string> values;
  std::map<std::string, int64_t> counters;
  bool lost = false;  // every operation throws
};

// An AgentStore in this process: c10d's TCPStore without the network.
class MemoryAgentStore : public AgentStore {
 public:
  // The connection is lost after `operations`, or never if that is below 0.
  explicit MemoryAgentStore(std::shared_ptr<StoredKeys> keys,
                            int64_t operations = -1)
      : keys_(std::move(keys)), operations_left_(operations) {}

  void set(const std::string& key, const std::string& value) override {
    const auto lock = locked();
    keys_->values[key] = value;
  }
  std::optional<std::string> get(const std::string& key) override {
    const auto lock = locked();
    const auto found = keys_->values.find(key);
    if (found == keys_->values.end()) return std::nullopt;
    return found->second;
  }
  bool check(const std::string& key) override {
    const auto lock = locked();
    return keys_->values.count(key) > 0;
  }
  void remove(const std::string& key) override {
    const auto lock = locked();
    keys_->values.erase(key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const auto lock = locked();
    return keys_->counters[key] += amount;
  }
  std::string set_if_absent(const std::string& key,
                            const std::string& value) override {
    const auto lock = locked();
    return keys_->values.emplace(key, value).first->second;
  }

 private:
  std::unique_lock<std::mutex> locked() {
    std::unique_lock lock(keys_->mutex);
    if (keys_->lost || operations_left_-- == 0)
      throw AgentStoreError("the connection is closed");
    return lock;
  }

  std::shared_ptr<StoredKeys> keys_;
  int64_t operations_left_;
};

}  // namespace lockstep::internal::testing
