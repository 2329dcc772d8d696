#include "lockstep/comm/hybrid/topology.h"

#include <algorithm>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/comm/gather_texts.h"
#include "lockstep/comm/host_sharing.h"
#include "lockstep/comm/shm/protocol/layout.h"
#include "lockstep/comm/shm/protocol_call.h"
#include "lockstep/comm/shm/store_exchange.h"

namespace lockstep::internal::hybrid {
namespace {

std::string numbered(const char* what, int rank) {
  return what + std::to_string(rank);
}

// A rank that cannot tell on which host it runs stands alone, on Gloo.
std::string identity_of_this_host(int rank) {
  return host_id().value_or(numbered("unknown, of rank ", rank));
}

// Writes `own` to the store under `what` and this rank's number. Returns what
// every rank has written so, in rank order.
std::vector<std::string> told(const BackendRequest& request, const char* what,
                              const std::string& own,
                              const Deadline& deadline) {
  try {
    return gather_texts(request.members(), what, own, deadline);
  } catch (const RanksAbsent& error) {
    throw c10::DistBackendError(
        c10::str(error.what_without_backtrace(),
                 " (for a Python rank, name \"cpu:gloo\" on all ranks)"));
  }
}

std::vector<int> named(const std::vector<int>& ranks,
                       const BackendRequest& request) {
  std::vector<int> names;
  for (int rank : ranks) names.push_back(request.global_ranks[rank]);
  return names;
}

// Returns the ranks that name the same host as this rank, or the part of them
// that this rank belongs to: a segment has room for so many only.
std::vector<int> candidates(const std::vector<std::string>& hosts, int rank) {
  std::vector<int> part;
  for (int other = 0; other < static_cast<int>(hosts.size()); ++other) {
    if (hosts[other] != hosts[rank]) continue;
    if (part.size() == shm::kMaxRanks) {
      if (std::ranges::count(part, rank)) break;
      part.clear();
    }
    part.push_back(other);
  }
  return part;
}

std::optional<shm::Membership> try_to_meet(const BackendRequest& request,
                                           const std::vector<int>& ranks,
                                           const Deadline& deadline) {
  auto store = c10::make_intrusive<c10d::PrefixStore>(
      numbered("of/", ranks.front()) + "/", request.store);
  const int position =
      static_cast<int>(std::ranges::find(ranks, request.rank) - ranks.begin());
  const int size = static_cast<int>(ranks.size());
  try {
    return shm::meet(shm::exchange_over(store),
                     {.rank = position,
                      .size = size,
                      .global_ranks = named(ranks, request),
                      .timeout = shm::left(deadline),
                      .tuning = shm::choose_tuning(size)});
  } catch (const shm::Unavailable& error) {
    if (position == 0) {
      TORCH_WARN("lockstep: ranks ", named(ranks, request),
                 " are on one host and use Gloo, as they cannot share memory: ",
                 error.what());
    }
    return std::nullopt;
  }
}

}  // namespace

int Topology::lanes() const {
  size_t least = hosts.front().size();
  for (const auto& ranks : hosts) least = std::min(least, ranks.size());
  return static_cast<int>(least);
}

Neighbours find_neighbours(const BackendRequest& request,
                           const Deadline& deadline) {
  const auto hosts =
      told(request, "host/", identity_of_this_host(request.rank), deadline);
  const auto ranks = candidates(hosts, request.rank);
  Neighbours found;
  if (ranks.size() > 1) {
    found.membership = try_to_meet(request, ranks, deadline);
  }
  const int first = found.membership ? ranks.front() : request.rank;
  const auto shares = told(request, "shares/", std::to_string(first), deadline);
  std::map<int, std::vector<int>> by_first;
  for (int rank = 0; rank < request.size; ++rank) {
    by_first[std::stoi(shares[rank])].push_back(rank);
  }
  auto& topology = found.topology;
  for (auto& [leader, members] : by_first) {
    if (leader == first) {
      topology.host = static_cast<int>(topology.hosts.size());
      topology.local = static_cast<int>(
          std::ranges::find(members, request.rank) - members.begin());
    }
    topology.hosts.push_back(std::move(members));
  }
  return found;
}

}  // namespace lockstep::internal::hybrid
