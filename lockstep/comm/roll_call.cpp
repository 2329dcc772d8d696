#include "lockstep/comm/roll_call.h"

#include <algorithm>
#include <thread>

#include "lockstep/comm/watched_store.h"

namespace lockstep {
namespace {

constexpr std::chrono::microseconds kFirstPause{50};
constexpr std::chrono::microseconds kLongestPause{5'000};
constexpr std::chrono::milliseconds kTellTime{1'000};

std::string key(uint64_t number, int rank) {
  return "roll_call/" + std::to_string(number) + "/" + std::to_string(rank);
}

std::string key(uint64_t number, const char* leaf) {
  return "roll_call/" + std::to_string(number) + "/" + leaf;
}

bool has_come(c10d::Store& store, uint64_t number, int rank) {
  try {
    return store.check({key(number, rank)});
  } catch (const PeerGone&) {
    return false;
  }
}

// Returns which ranks are not there, or nothing if the last one has just come.
std::string late_ranks(const ProcessGroup& group, uint64_t number) {
  std::string late;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (has_come(*group.store(), number, rank)) continue;
    late += (late.empty() ? "rank " : ", ") +
            std::to_string(group.global_rank(rank));
  }
  return late.empty() ? late : late + " did not come in time";
}

// The first rank that gives up says why for all, so that all say the same. The
// store may be gone once rank 0 has left, so rank 0 waits until the ranks that
// came have been told, for kTellTime at most.
[[noreturn]] void fail(const ProcessGroup& group, uint64_t number,
                       const std::string& why) {
  auto& store = *group.store();
  std::string agreed = why;
  try {
    agreed = store.compareSet(key(number, "absent"), std::string(), why);
    int64_t present = 0;
    for (int rank = 0; rank < group.size(); ++rank) {
      present += has_come(store, number, rank);
    }
    store.add(key(number, "told"), 1);
    if (group.global_rank(group.rank()) != 0) throw RollCallError(agreed);
    auto deadline = Deadline::after(kTellTime);
    while (store.add(key(number, "told"), 0) < present && !deadline.expired()) {
      std::this_thread::sleep_for(kLongestPause);
    }
  } catch (const c10::Error&) {
    // The store is gone, and with it the rank that hosted it.
  }
  throw RollCallError(agreed);
}

// Waits until all `keys` of the n-th roll call are there. Returns why they will
// not come, or nothing.
std::string await_all(ProcessGroup& group, uint64_t number,
                      const std::vector<std::string>& keys,
                      const Deadline& deadline) {
  auto& store = *group.store();
  // Asks again and again, as another rank may be the first to give up.
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    const bool late = deadline.expired();
    const bool all = store.check(keys);
    // If another rank has given up, the roll call ends for all ranks, even if
    // every rank has come since. fail() replaces this text by that rank's.
    if (store.check({key(number, "absent")})) return "another rank gave up";
    if (all) return {};
    if (late) {
      if (auto absent = late_ranks(group, number); !absent.empty()) {
        return absent;
      }
      continue;
    }
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace

std::vector<std::string> roll_call(ProcessGroup& group, const std::string& text,
                                   const Deadline& deadline) {
  auto& store = *group.store();
  const uint64_t number = group.next_roll_call();
  // Begins with a character, because some stores take an empty value for none.
  const std::string value = "=" + text;
  std::vector<std::string> keys;
  for (int rank = 0; rank < group.size(); ++rank) {
    keys.push_back(key(number, rank));
  }
  std::string why;
  try {
    store.set(keys[group.rank()],
              std::vector<uint8_t>(value.begin(), value.end()));
    why = await_all(group, number, keys, deadline);
  } catch (const PeerGone& gone) {
    why = gone.what_without_backtrace();
  }
  if (!why.empty()) fail(group, number, why);
  std::vector<std::string> texts;
  for (const auto& bytes : store.multiGet(keys)) {
    texts.emplace_back(bytes.begin() + 1, bytes.end());
  }
  // A rank that has come to this roll call has read the one before.
  if (number > 1) store.deleteKey(key(number - 1, group.rank()));
  return texts;
}

}  // namespace lockstep
