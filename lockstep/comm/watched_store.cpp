#include "lockstep/comm/watched_store.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "lockstep/base/interruption.h"
#include "lockstep/comm/last_words.h"
#include "lockstep/worker/standby_place.h"

namespace lockstep::internal {
namespace {

using std::chrono::milliseconds;

constexpr const char* kGaveUp = "lockstep/gave_up";
constexpr milliseconds kBetweenLooks{50};
// The time to wait for the life sign of the rank that hosted the store: a store
// closes before it is known that the process that has it is gone.
constexpr milliseconds kStoreHostGone{1'000};

}  // namespace

WatchedStore::WatchedStore(c10::intrusive_ptr<c10d::Store> store,
                           std::shared_ptr<LifeSigns> life_signs,
                           std::vector<int> ranks, Look look)
    : store_(std::move(store)),
      life_signs_(std::move(life_signs)),
      ranks_(std::move(ranks)),
      look_(std::move(look)) {}

void WatchedStore::give_up(const std::string& why) noexcept {
  try {
    LastWords(*store_, kGaveUp).say(why);
  } catch (const std::exception&) {
    // The store is gone, and the others know.
  }
}

template <typename Call>
decltype(auto) WatchedStore::asked(Call&& call) {
  try {
    return std::forward<Call>(call)();
  } catch (const StoreRefusal&) {
    throw;  // the store lives
  } catch (const c10::DistError& error) {
    std::string words;
    if (!poll_store(Deadline::after(kStoreHostGone), [&] {
          return life_signs_ &&
                 !(words = words_of(life_signs_->gone())).empty();
        })) {
      words = error.what_without_backtrace();
    }
    throw PeerGone("the store in which the ranks meet is gone: " + words);
  }
}

void WatchedStore::require_all_alive() {
  std::vector<LifeSigns::Gone> gone;
  if (life_signs_) gone = life_signs_->gone_for_good(ranks_);
  throw_for(gone);
}

void WatchedStore::throw_for(const std::vector<LifeSigns::Gone>& gone) {
  // A rank that left because of an error may have written which error.
  const bool may_have_said =
      gone.empty() || std::ranges::any_of(gone, [](const auto& rank) {
        return rank.end == LifeSigns::End::failed;
      });
  std::optional<std::string> said;
  if (may_have_said) {
    said = asked([&] { return LastWords(*store_, kGaveUp).heard(); });
  }
  const auto words = said.value_or(words_of(gone));
  if (!words.empty()) throw PeerGone(words);
}

void WatchedStore::look() {
  {
    std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (now - looked_ < kBetweenLooks) return;
    looked_ = now;
  }
  check_interruption();
  if (const auto look_also = look_.lock()) (*look_also)();
  std::vector<LifeSigns::Gone> gone;
  if (life_signs_) gone = life_signs_->gone(ranks_);
  throw_for(gone);
}

bool WatchedStore::check(const std::vector<std::string>& keys) {
  look_for_agent();
  if (asked([&] { return store_->check(keys); })) return true;
  try {
    look();
  } catch (const PeerGone&) {
    // A value that the rank wrote before it went is in the store by now, so
    // look once more.
    if (asked([&] { return store_->check(keys); })) return true;
    throw;
  }
  return false;
}

void WatchedStore::wait(const std::vector<std::string>& keys) {
  wait(keys, getTimeout());
}

void WatchedStore::wait(const std::vector<std::string>& keys,
                        const milliseconds& timeout) {
  if (!poll_store(Deadline::after(timeout), [&] { return check(keys); })) {
    throw c10::DistStoreError(c10::str("the ranks did not write ", keys,
                                       " to the store within ", timeout.count(),
                                       " ms"));
  }
}

std::vector<uint8_t> WatchedStore::get(const std::string& key) {
  wait({key});
  return asked([&] { return store_->get(key); });
}

void WatchedStore::set(const std::string& key,
                       const std::vector<uint8_t>& value) {
  asked([&] { store_->set(key, value); });
}

std::vector<uint8_t> WatchedStore::compareSet(
    const std::string& key, const std::vector<uint8_t>& expected,
    const std::vector<uint8_t>& desired) {
  return asked([&] { return store_->compareSet(key, expected, desired); });
}

int64_t WatchedStore::add(const std::string& key, int64_t value) {
  return asked([&] { return store_->add(key, value); });
}

bool WatchedStore::deleteKey(const std::string& key) {
  return asked([&] { return store_->deleteKey(key); });
}

int64_t WatchedStore::getNumKeys() {
  return asked([&] { return store_->getNumKeys(); });
}

const milliseconds& WatchedStore::getTimeout() const noexcept {
  return store_->getTimeout();
}

void WatchedStore::setTimeout(const milliseconds& timeout) {
  store_->setTimeout(timeout);
}

void WatchedStore::append(const std::string& key,
                          const std::vector<uint8_t>& value) {
  asked([&] { store_->append(key, value); });
}

std::vector<std::vector<uint8_t>> WatchedStore::multiGet(
    const std::vector<std::string>& keys) {
  wait(keys);
  return asked([&] { return store_->multiGet(keys); });
}

void WatchedStore::multiSet(const std::vector<std::string>& keys,
                            const std::vector<std::vector<uint8_t>>& values) {
  asked([&] { store_->multiSet(keys, values); });
}

bool WatchedStore::hasExtendedApi() const { return store_->hasExtendedApi(); }

}  // namespace lockstep::internal
