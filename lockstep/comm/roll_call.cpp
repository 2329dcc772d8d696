#include "lockstep/comm/roll_call.h"

#include <algorithm>
#include <thread>

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

// The first to run out of time says for all who is absent, so that all say the
// same. Whoever leaves may take the store along: not before all know, or for
// kTellTime.
[[noreturn]] void fail(const ProcessGroup& group, uint64_t number) {
  auto& store = *group.store();
  std::string absent;
  int64_t present = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (store.check({key(number, rank)})) {
      ++present;
    } else {
      absent += (absent.empty() ? "" : ", ") +
                std::to_string(group.global_rank(rank));
    }
  }
  const auto agreed =
      store.compareSet(key(number, "absent"), {},
                       std::vector<uint8_t>(absent.begin(), absent.end()));
  store.add(key(number, "told"), 1);
  auto deadline = Deadline::after(kTellTime);
  while (store.add(key(number, "told"), 0) < present && !deadline.expired()) {
    std::this_thread::sleep_for(kLongestPause);
  }
  throw RollCallError("rank " + std::string(agreed.begin(), agreed.end()) +
                      " did not come in time");
}

}  // namespace

std::vector<std::string> roll_call(ProcessGroup& group, const std::string& text,
                                   const Deadline& deadline) {
  auto& store = *group.store();
  const uint64_t number = group.next_roll_call();
  // A character in front: an empty value is as good as none to some stores.
  const std::string value = "=" + text;
  std::vector<std::string> keys;
  for (int rank = 0; rank < group.size(); ++rank) {
    keys.push_back(key(number, rank));
  }
  store.set(keys[group.rank()],
            std::vector<uint8_t>(value.begin(), value.end()));
  // Asked for again and again, as LibTorch prints a warning of its own when
  // Store::wait() runs out of time.
  for (auto pause = kFirstPause; !store.check(keys);
       pause = std::min(2 * pause, kLongestPause)) {
    if (store.check({key(number, "absent")})) fail(group, number);
    if (deadline.expired()) {
      if (store.check(keys)) break;  // at the last moment
      fail(group, number);
    }
    std::this_thread::sleep_for(pause);
  }
  std::vector<std::string> texts;
  for (const auto& bytes : store.multiGet(keys)) {
    texts.emplace_back(bytes.begin() + 1, bytes.end());
  }
  // Whoever came to this one has read the one before.
  if (number > 1) store.deleteKey(key(number - 1, group.rank()));
  return texts;
}

}  // namespace lockstep
