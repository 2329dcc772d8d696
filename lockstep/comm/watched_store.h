#pragma once

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "lockstep/comm/life_signs.h"

namespace lockstep::internal {

// Thrown if a wait for a key of the store cannot end well any more: a rank of
// the group is gone or could not make its part of the group, or the store went
// with the rank that hosted it. The text says which.
class PeerGone : public c10::DistStoreError {
 public:
  using DistStoreError::DistStoreError;
};

// Thrown by a store that lives but does not do what was asked of it.
class StoreRefusal : public c10::DistStoreError {
 public:
  using DistStoreError::DistStoreError;
};

// A group's part of the store, for ranks that wait for each other: a rank that
// asks in vain for a key (check(), wait(), get()) is told within a second that
// a rank of the group is gone, instead of at its deadline. So the death of a
// rank ends every loop over check(), including LibTorch's own (Gloo's
// connecting).
//
// A rank that cannot make its part of the group tells the others why with
// give_up(): then check(), wait() and get() of the others throw PeerGone with
// its words (last_words.h). Key: "lockstep/gave_up".
//
// wait() and get() poll, so that LibTorch prints no warning of its own when
// their time is over; they throw c10::DistStoreError then. Errors of the store
// itself become PeerGone, except StoreRefusal. A clone() is not watched.
//
// Threads: any, as for the store inside.
class WatchedStore final : public c10d::Store {
 public:
  // Called some twenty times a second in every wait for a key, as long as its
  // owner lives; what it throws ends the wait.
  using Look = std::weak_ptr<const std::function<void()>>;

  // `ranks` are the group's ranks in the default group. Without `life_signs`
  // (null) a rank is told only of those that gave up.
  WatchedStore(c10::intrusive_ptr<c10d::Store> store,
               std::shared_ptr<LifeSigns> life_signs, std::vector<int> ranks,
               Look look = {});

  // Throws PeerGone if a rank of the group is gone by now. For use before
  // something that cannot be interrupted (Gloo's connecting).
  void require_all_alive();

  // Tells the other ranks why this one gives up ("rank 0 gave up: ..."). The
  // first rank to give up is heard. Throws nothing.
  void give_up(const std::string& why) noexcept;

  c10::intrusive_ptr<Store> clone() override { return store_->clone(); }
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
  const std::chrono::milliseconds& getTimeout() const noexcept override;
  void setTimeout(const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key,
              const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(
      const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override;

 private:
  template <typename Call>
  decltype(auto) asked(Call&& call);
  // Throws PeerGone if `gone` is not empty, or a rank has given up.
  void throw_for(const std::vector<LifeSigns::Gone>& gone);
  // Does the same for the ranks that are gone now; looks some twenty times a
  // second.
  void look();

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<LifeSigns> life_signs_;
  const std::vector<int> ranks_;
  const Look look_;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point looked_{};
};

}  // namespace lockstep::internal
