#include "lockstep/comm/hybrid/create.h"

#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "lockstep/comm/gloo/create.h"
#include "lockstep/comm/hybrid/backend.h"
#include "lockstep/comm/hybrid/topology.h"
#include "lockstep/comm/shm/backend.h"
#include "lockstep/comm/shm/protocol_call.h"
#include "lockstep/comm/shm/store_exchange.h"

namespace lockstep::internal::hybrid {
namespace {

// Connects `ranks` of the group by Gloo.
c10::intrusive_ptr<c10d::Backend> connect(const BackendRequest& request,
                                          const std::string& name,
                                          const std::vector<int>& ranks,
                                          int position,
                                          const Deadline& deadline) {
  BackendRequest part{.store = c10::make_intrusive<c10d::PrefixStore>(
                          name + "/", request.store),
                      .rank = position,
                      .size = static_cast<int>(ranks.size()),
                      .timeout = request.timeout,
                      .group_name = request.group_name + "/" + name,
                      .global_ranks = {},
                      .meets_within = shm::left(deadline)};
  for (int rank : ranks)
    part.global_ranks.push_back(request.global_ranks[rank]);
  return gloo::create(part);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  const auto deadline = Deadline::after(request.time_to_meet());
  auto [topology, membership] =
      shm::translated([&] { return find_neighbours(request, deadline); });
  const auto hosts = topology.hosts.size();
  if (hosts == 1) {
    if (!membership) {  // a world of one
      try {
        membership = shm::meet(shm::exchange_over(request.store),
                               {.rank = 0,
                                .size = 1,
                                .global_ranks = request.global_ranks,
                                .timeout = shm::left(deadline),
                                .tuning = shm::choose_tuning(1)});
      } catch (const shm::Unavailable& error) {
        TORCH_WARN("lockstep: Gloo is used, as there is no shared memory: ",
                   error.what());
        return gloo::create(request);
      }
    }
    return c10::make_intrusive<shm::Backend>(std::move(*membership),
                                             request.timeout);
  }
  if (hosts == static_cast<size_t>(request.size)) return gloo::create(request);
  Links links;
  std::vector<int> everyone(request.size);
  for (int rank = 0; rank < request.size; ++rank) everyone[rank] = rank;
  links.flat = connect(request, "flat", everyone, request.rank, deadline);
  if (topology.local < topology.lanes()) {
    std::vector<int> lane;
    for (const auto& ranks : topology.hosts) {
      lane.push_back(ranks[topology.local]);
      if (ranks[topology.local] == request.rank) continue;
      links.lane_peers +=
          (links.lane_peers.empty() ? "" : ", ") +
          std::to_string(request.global_ranks[ranks[topology.local]]);
    }
    links.lane = connect(request, "lane" + std::to_string(topology.local), lane,
                         topology.host, deadline);
  }
  if (membership) {
    links.local = std::make_shared<shm::Group>(std::move(*membership));
  }
  return c10::make_intrusive<Backend>(request.rank, request.size,
                                      std::move(topology), std::move(links),
                                      request.timeout);
}

}  // namespace lockstep::internal::hybrid
