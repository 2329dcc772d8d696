#include "lockstep/comm/gather_texts.h"

#include <utility>

#include "lockstep/comm/watched_store.h"

namespace lockstep::internal {
namespace {

// Returns the global ranks of the members that have not come, "2, 5".
std::string absent(const StoreMembers& members,
                   const std::vector<std::string>& keys) {
  std::string ranks;
  for (size_t member = 0; member < keys.size(); ++member) {
    if (has_come(members.store, keys[member])) continue;
    ranks += (ranks.empty() ? "" : ", ") +
             std::to_string(members.global_ranks[member]);
  }
  return ranks;
}

}  // namespace

bool has_come(c10d::Store& store, const std::string& key) {
  try {
    return store.check({key});
  } catch (const PeerGone&) {
    return false;
  }
}

std::vector<std::string> gather_texts(const StoreMembers& members,
                                      const std::string& prefix,
                                      const std::string& text,
                                      const Deadline& deadline,
                                      const std::function<void()>& look) {
  std::vector<std::string> keys;
  for (size_t member = 0; member < members.global_ranks.size(); ++member) {
    keys.push_back(prefix + std::to_string(member));
  }
  // Begins with a character, because some stores take an empty value for none.
  members.store.set(keys.at(members.rank), "=" + text);
  // The first question is about all members, later ones about the first that is
  // missing: many ranks that wait for a late one must not keep the store busy.
  size_t next = 0;
  bool asked = false;
  const auto all_have_come = [&] {
    if (!std::exchange(asked, true)) return members.store.check(keys);
    while (next < keys.size() && members.store.check({keys[next]})) ++next;
    return next == keys.size();
  };
  const auto ask = [&] {
    const bool all = all_have_come();
    if (look) look();
    return all;
  };
  while (!poll_store(deadline, ask)) {
    const auto ranks = absent(members, keys);
    if (ranks.empty()) continue;  // the last has come at the last moment
    throw RanksAbsent("rank " + ranks + " did not come in time");
  }
  std::vector<std::string> texts;
  for (const auto& bytes : members.store.multiGet(keys)) {
    texts.emplace_back(bytes.begin() + 1, bytes.end());
  }
  return texts;
}

}  // namespace lockstep::internal
