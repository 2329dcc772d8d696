#include "lockstep/comm/check_in.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "lockstep/base/environment.h"
#include "lockstep/comm/watched_store.h"

namespace lockstep::internal {
namespace {

// The mark of the store of the previous join. It needs no lock: only
// init_process_group() comes here, and holds one.
std::string& last_host() {
  static std::string mark;
  return mark;
}

}  // namespace

std::string CheckIn::round_prefix(bool agent_store) {
  static std::atomic<int> rounds{0};
  auto restart = get_env("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return "lockstep/" + restart +
         (agent_store ? "." + std::to_string(rounds++) : "");
}

CheckIn::CheckIn(c10::intrusive_ptr<c10d::Store> store, std::string prefix,
                 int rank, int world_size)
    : store_(std::move(store)),
      prefix_(std::move(prefix)),
      rank_(rank),
      world_size_(world_size) {}

std::string CheckIn::key(const char* what) const {
  return prefix_ + "/" + what;
}

std::string CheckIn::key(const char* what, int of) const {
  return key(what) + "/" + std::to_string(of);
}

void CheckIn::announce() const {
  auto size = std::to_string(world_size_);
  auto first = store_->compareSet(key("world_size"), std::string(), size);
  if (first != size) {
    throw std::invalid_argument(
        "rank " + std::to_string(rank_) + " was started with world size " +
        size + ", another rank of the same job with world size " + first +
        "; start every rank with the same WORLD_SIZE");
  }
  if (store_->add(key("rank", rank_), 1) != 1) {
    throw std::invalid_argument(
        "two processes of this job call themselves rank " +
        std::to_string(rank_) + " of " + size + " (this one is pid " +
        std::to_string(::getpid()) + "); give each its own RANK");
  }
}

void CheckIn::await_briefly() const {
  constexpr std::chrono::milliseconds kAllowed{50};
  constexpr std::chrono::microseconds kLongestPause{2000};
  std::vector<std::string> ranks;
  for (int other = 0; other < world_size_; ++other) {
    ranks.push_back(key("rank", other));
  }
  poll_store(
      Deadline::after(kAllowed), [&] { return store_->check(ranks); },
      kLongestPause);
  // The last rank counts itself next.
  std::this_thread::sleep_for(std::chrono::microseconds(200));
}

int CheckIn::agreed_world_size() const {
  return std::stoi(store_->get_to_str(key("world_size")));
}

std::string CheckIn::absent_ranks() const {
  std::string absent;
  try {
    for (int other = 0; other < world_size_; ++other) {
      if (!store_->check({key("rank", other)})) {
        absent += (absent.empty() ? "" : ", ") + std::to_string(other);
      }
    }
  } catch (const c10::Error&) {  // the store is gone
    return {};
  }
  return absent;
}

void CheckIn::mark_host() const {
  std::random_device random;
  store_->set(key("host"),
              std::to_string(random()) + "." + std::to_string(random()));
}

void CheckIn::remember_host() const {
  last_host().clear();
  if (store_->check({key("host")}))
    last_host() = store_->get_to_str(key("host"));
}

bool CheckIn::is_new_host(const Deadline& deadline) const {
  if (last_host().empty()) return true;
  constexpr std::chrono::seconds kHostSaysSo{2};
  try {
    // A Python rank 0 writes no mark.
    return !poll_store(Deadline::after(std::min<std::chrono::milliseconds>(
                           kHostSaysSo, deadline.remaining())),
                       [&] { return store_->check({key("host")}); }) ||
           store_->get_to_str(key("host")) != last_host();
  } catch (const c10::DistNetworkError&) {
    return false;  // the previous store was closed meanwhile
  }
}

std::string CheckIn::groups_prefix() const {
  // The prefix does not depend on the number of the restart: whether a launcher
  // keeps its store over restarts or makes a new one differs between its
  // releases and options.
  return store_->compareSet("lockstep/unprefixed", "", prefix_) == prefix_
             ? ""
             : prefix_ + "/groups";
}

bool CheckIn::part(LifeSigns* life_signs, const Deadline& deadline) const {
  constexpr std::chrono::milliseconds kLongestPause{20};
  // Comes before the store is asked, because LibTorch prints a warning when
  // rank 0 of that store is gone.
  const auto require_no_failure = [&] {
    if (life_signs == nullptr) return;
    for (const auto& rank : life_signs->gone_for_good()) {
      if (rank.end != LifeSigns::End::left) throw PeerGone(rank.words);
    }
  };
  const auto await = [&](const std::vector<std::string>& keys) {
    const auto ask = [&] {
      require_no_failure();
      return store_->check(keys);
    };
    return poll_store(deadline, ask, kLongestPause);
  };
  // Three steps (left, parted, gone), so that the store never goes while an
  // answer is on its way: LibTorch would print a stack trace.
  try {
    require_no_failure();
    if (rank_ != 0) {
      if (!store_->check({key("rank", 0)})) return true;  // a Python rank 0
      store_->set(key("left", rank_), "1");
      if (!await({key("parted")})) return false;
      store_->set(key("gone", rank_), "1");
      return true;
    }
    std::vector<std::string> left;
    std::vector<std::string> gone;
    for (int other = 1; other < world_size_; ++other) {
      if (!store_->check({key("rank", other)})) continue;  // a Python rank
      left.push_back(key("left", other));
      gone.push_back(key("gone", other));
    }
    if (left.empty()) return true;
    if (!await(left)) return false;
    store_->set(key("parted"), "1");
    return await(gone);
  } catch (const c10::Error&) {
    // The store or a rank is gone: nothing is left to wait for.
    return true;
  }
}

}  // namespace lockstep::internal
