// Measures the cost of a rendezvous of many nodes: agents as threads of this
// process, which meet at the agents' store over loopback and TLS, agree on a
// round, report success and leave.
//
//   rendezvous AGENTS...
//
// prints for each number of agents one object of JSON: the time from the first
// connection until every agent has its plan (`plan_ms`) and until every agent
// has departed (`end_ms`), and the processor time of all until then (`cpu_ms`):
// that of the store and of every agent, which share this host's cores.
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>

#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "lockstep/base/endpoint.h"
#include "lockstep/launch/nodes/node_protocol.h"
#include "lockstep/launch/nodes/store/store_client.h"
#include "lockstep/launch/nodes/store/store_server.h"

namespace lockstep::internal {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

const std::string kSecret = "the secret of this benchmark";

double processor_ms() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 +
         static_cast<double>(time.tv_nsec) / 1e6;
}

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin)
      .count();
}

// Asks `what` until it has an answer, and waits for news in between.
template <typename Take>
void await(NodeProtocol& protocol, int wake_fd, Take take) {
  while (!take()) {
    protocol.beat(Clock::now());
    protocol.await_news(milliseconds(500), wake_fd);
  }
}

void take_part(AgentStore& store, int agents, int rank,
               std::atomic<int>& plans) {
  const FileDescriptor never(eventfd(0, EFD_CLOEXEC));
  NodeDescription self;
  self.nnodes = agents;
  self.host = "host" + std::to_string(rank);
  self.hosts_store = rank == 0;
  NodeProtocol protocol(store, self);
  protocol.join();
  protocol.offer_round(0, {"192.0.2.1", 29500});
  await(protocol, never.get(), [&] { return protocol.take_plan(); });
  ++plans;
  protocol.report_success();
  await(protocol, never.get(), [&] { return protocol.take_verdict(); });
  protocol.depart();
}

nlohmann::json measure(int agents) {
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const SocketAddress loopback(reinterpret_cast<sockaddr*>(&any), sizeof(any));
  FileDescriptor listener = bind_socket(loopback);
  int ends[2];
  if (!listener || listen(listener.get(), agents) != 0 ||
      socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw_errno("the sockets of the store");
  }
  const SocketAddress where = bound_address(listener.get());
  const Deadline deadline = Deadline::after(seconds(120));
  StoreServerLimits limits;
  limits.until_hello = seconds(120);  // all begin at once, on few cores
  limits.strangers = static_cast<size_t>(agents);
  const StoreServer server(std::move(listener), FileDescriptor(ends[0]),
                           kSecret, limits);

  const double processor = processor_ms();
  const Clock::time_point begin = Clock::now();
  std::atomic<int> plans{0};
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < agents; ++rank) {
    threads.emplace_back([&, rank, own = ends[1]] {
      StoreClient store(
          rank == 0 ? FileDescriptor(own) : connect_to(where, seconds(120)),
          rank == 0 ? std::nullopt : std::optional(kSecret), deadline);
      take_part(store, agents, rank, plans);
    });
  }
  while (plans < agents) std::this_thread::sleep_for(milliseconds(1));
  const double plan_ms = ms_since(begin);
  threads.clear();
  return {{"agents", agents},
          {"plan_ms", plan_ms},
          {"end_ms", ms_since(begin)},
          {"cpu_ms", processor_ms() - processor}};
}

}  // namespace
}  // namespace lockstep::internal

int main(int argc, char** argv) {
  for (int argument = 1; argument < argc; ++argument) {
    const std::string_view text = argv[argument];
    int agents = 0;
    std::from_chars(text.data(), text.data() + text.size(), agents);
    if (agents < 1 || agents > 4096) {
      std::fprintf(stderr,
                   "rendezvous: \"%s\" is not a number from 1 to 4096\n",
                   argv[argument]);
      return 2;
    }
    std::printf("%s\n", lockstep::internal::measure(agents).dump().c_str());
    std::fflush(stdout);
  }
  return 0;
}
