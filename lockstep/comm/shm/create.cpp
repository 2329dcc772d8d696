#include "lockstep/comm/shm/create.h"

#include <unistd.h>

#include <array>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/environment.h"
#include "lockstep/comm/gather_texts.h"
#include "lockstep/comm/shm/backend.h"
#include "lockstep/comm/shm/protocol/handshake.h"
#include "lockstep/comm/shm/protocol/layout.h"
#include "lockstep/comm/shm/protocol_call.h"
#include "lockstep/comm/shm/store_exchange.h"

namespace lockstep::internal::shm {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Called after a failure that all ranks hear of.
void wait_until_all_know(c10d::Store& store, int size) {
  try {
    store.add("told", 1);
    poll_store(Deadline::after(std::chrono::seconds(1)),
               [&] { return store.add("told", 0) >= size; });
  } catch (const c10::Error&) {  // the store is gone already
  }
}

[[noreturn]] void fail(const std::string& why) {
  throw c10::DistBackendError(why);
}

// A rank's description of its host: the identity, which is compared, and a name
// for error texts.
struct Host {
  std::string identity;
  std::string name;
};

Host read_host(const std::string& text) {
  const auto line = text.find('\n');
  return {text.substr(0, line), line == text.npos ? "" : text.substr(line + 1)};
}

// Throws if the ranks are not on one host. All ranks compare the same values,
// so all throw or none does. This comes before the handshake, which cannot
// connect ranks of different hosts and could not say why.
void require_one_host(c10d::Store& store, const BackendRequest& request,
                      const Deadline& deadline) {
  const auto texts =
      gather_texts({.store = store,
                    .rank = request.rank,
                    .global_ranks = request.global_ranks},
                   "host/", host_identity() + "\n" + host_name(), deadline);
  std::vector<Host> hosts;
  std::string elsewhere;
  for (int rank = 0; rank < request.size; ++rank) {
    hosts.push_back(read_host(texts[rank]));
    if (hosts[rank].identity == hosts[0].identity) continue;
    elsewhere +=
        c10::str(elsewhere.empty() ? "" : ", ", "rank ",
                 request.global_ranks[rank], " (on ", hosts[rank].name, ")");
  }
  if (elsewhere.empty()) return;
  wait_until_all_know(store, request.size);
  fail(c10::str(
      "these ranks cannot share memory with rank ", request.global_ranks[0],
      " (on ", hosts[0].name, "): ", elsewhere,
      "; they run on another host, as another user or in another network "
      "namespace. Give \"gloo\" instead"));
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(const BackendRequest& request) {
  if (request.size > kMaxRanks) {
    throw std::invalid_argument(c10::str("\"shm\" takes groups of up to ",
                                         kMaxRanks, " ranks, this one has ",
                                         request.size, "; give \"gloo\""));
  }
  const auto deadline = Deadline::after(request.time_to_meet());
  const StorePtr store =
      c10::make_intrusive<c10d::PrefixStore>("shm", request.store);
  return translated([&] {
    require_one_host(*store, request, deadline);
    const Meeting meeting{.rank = request.rank,
                          .size = request.size,
                          .global_ranks = request.global_ranks,
                          .timeout = left(deadline),
                          .tuning = choose_tuning(request.size)};
    try {
      return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Backend>(
          meet(exchange_over(store), meeting), request.timeout));
    } catch (const Unavailable&) {
      wait_until_all_know(*store, request.size);
      throw;
    }
  });
}

}  // namespace lockstep::internal::shm
