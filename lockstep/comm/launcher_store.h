#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/worker/worker_store_link.h"

namespace lockstep::internal {

// The store that the launcher keeps for the workers of an attempt, as a
// c10d::Store: all ranks of the job reach it, each through its own agent
// (docs/internals/launcher.md, "The workers' store"). Has what TCPStore has,
// without queues and listKeys().
//
// Each call has until the store's timeout (zero means for ever). Throws
// c10::DistStoreError if a key does not come in time, StoreRefusal if the store
// refuses a call, and c10::DistNetworkError, in one line, if the agent has
// ended or does not answer.
//
// Threads: any. A thread that waits for a key holds up no other.
class LauncherStore final : public c10d::Store {
 public:
  // `name` is that of the agent's socket. Connects until `timeout`, which then
  // is the store's. Throws c10::DistNetworkError.
  LauncherStore(const std::string& name,
                const std::chrono::milliseconds& timeout);

  struct Place {
    int64_t count;  // how often the place was taken, until now
    // The name in which it is taken already; nothing if this store has it now.
    std::optional<std::string> taken_by{};
  };
  // Takes the place `key` in the name of `name`, until this store and all its
  // clones are gone, or the process is. Another name cannot take it meanwhile.
  Place claim(const std::string& key, const std::string& name);

  // The clone shares the connections, and has a timeout of its own.
  c10::intrusive_ptr<Store> clone() override;
  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  using Store::compareSet;
  std::vector<uint8_t> compareSet(const std::string& key,
                                  const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key,
              const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(
      const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }

 private:
  LauncherStore(std::shared_ptr<WorkerStoreLink> link,
                const std::chrono::milliseconds& timeout);

  WorkerReply ask(const WorkerCall& call);

  std::shared_ptr<WorkerStoreLink> link_;
};

}  // namespace lockstep::internal
