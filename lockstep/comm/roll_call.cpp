#include "lockstep/comm/roll_call.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "lockstep/base/interruption.h"
#include "lockstep/comm/backend_registry.h"
#include "lockstep/comm/gather_texts.h"
#include "lockstep/comm/group_inside.h"
#include "lockstep/comm/last_words.h"
#include "lockstep/comm/watched_store.h"

namespace lockstep::internal {
namespace {

// How long rank 0 waits for ranks that have come, but are slow.
constexpr std::chrono::seconds kAllRead{2};

std::string key(uint64_t number, const std::string& leaf) {
  return "roll_call/" + std::to_string(number) + "/" + leaf;
}

std::string key(uint64_t number, int rank) {
  return key(number, std::to_string(rank));
}

// The first rank that gives up says why for all, so that all say the same. The
// store may be gone once rank 0 has left, so rank 0 waits until the ranks that
// came have been told.
[[noreturn]] void fail(const ProcessGroup& group, uint64_t number,
                       const std::string& why) {
  auto& store = *inside(group).store();
  std::string agreed = why;
  try {
    const LastWords absent(store, key(number, "absent"));
    agreed = absent.say(why);
    if (group.global_rank(group.rank()) != 0) throw RollCallError(agreed);
    int64_t present = 0;
    for (int rank = 0; rank < group.size(); ++rank) {
      present += has_come(store, key(number, rank));
    }
    absent.await_heard(present);
  } catch (const c10::Error&) {
    // The store is gone, and with it the rank that hosted it.
  }
  throw RollCallError(agreed);
}

// The store may leave with rank 0, so it leaves last. The others ask the store
// for nothing more.
void let_all_read(const ProcessGroup& group, uint64_t number,
                  const Deadline& deadline) {
  auto& store = *inside(group).store();
  const auto& ranks = group.global_ranks();
  if (std::ranges::count(ranks, 0) == 0) return;
  const std::string count = key(number, "read");
  try {
    if (ranks[group.rank()] != 0) {
      store.add(count, 1);
      return;
    }
    const int64_t others = group.size() - 1;
    const auto allowed =
        std::min<std::chrono::milliseconds>(deadline.remaining(), kAllRead);
    poll_store(Deadline::after(allowed), [&] {
      check_interruption();
      return store.add(count, 0) >= others;
    });
    store.deleteKey(count);
  } catch (const c10::Error&) {
    // The store is gone, and with it the rank that hosted it.
  }
}

// Returns the texts that have come, and empty ones for the other ranks, when
// all that came have read them, or after a second.
std::vector<std::string> last_texts(const ProcessGroup& group,
                                    uint64_t number) {
  auto& store = *inside(group).store();
  std::vector<std::string> texts(group.size());
  std::vector<std::string> read;
  try {
    for (int rank = 0; rank < group.size(); ++rank) {
      if (!has_come(store, key(number, rank))) continue;
      texts[rank] = store.get_to_str(key(number, rank)).substr(1);
      read.push_back(key(number, "read/") + std::to_string(rank));
    }
    store.set(key(number, "read/") + std::to_string(group.rank()), "=");
    store.wait(read, std::chrono::seconds(1));
  } catch (const c10::Error&) {
    // A rank has gone since it came.
  }
  return texts;
}

}  // namespace

std::vector<std::string> roll_call(ProcessGroup& group, const std::string& text,
                                   const Deadline& deadline,
                                   AfterRollCall after) {
  if (imagines_peers(group)) {
    return std::vector<std::string>(group.size(), text);
  }
  auto& store = *inside(group).store();
  const uint64_t number = inside(group).next_roll_call();
  // If another rank has given up, the roll call ends for all ranks, even if
  // every rank has come since.
  const auto look = [&] {
    if (!store.check({key(number, "absent")})) return;
    fail(group, number, "another rank gave up");  // says why that rank did
  };
  std::vector<std::string> texts;
  std::string why;
  try {
    texts = gather_texts({.store = store,
                          .rank = group.rank(),
                          .global_ranks = group.global_ranks()},
                         key(number, ""), text, deadline, look);
  } catch (const RanksAbsent& error) {
    if (after != AfterRollCall::throws) why = error.what_without_backtrace();
  } catch (const PeerGone& gone) {
    why = gone.what_without_backtrace();
  }
  if (!why.empty()) fail(group, number, why);
  if (after == AfterRollCall::throws) return last_texts(group, number);
  // A rank that has come to this roll call has read the one before.
  if (number > 1) store.deleteKey(key(number - 1, group.rank()));
  const bool equal =
      std::ranges::adjacent_find(texts, std::not_equal_to<>()) == texts.end();
  if (after == AfterRollCall::may_leave && equal) {
    let_all_read(group, number, deadline);
  }
  return texts;
}

}  // namespace lockstep::internal
