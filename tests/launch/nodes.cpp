#include "tests/launch/nodes.h"

#include <thread>

#include "lockstep/base/deadline.h"
#include "lockstep/base/endpoint.h"

namespace lockstep::internal::testing {

NodesTest::NodesTest() {
  set_for_all("LOCKSTEP_JOB_SECRET=the secret of these tests");
}

std::vector<std::string> NodesTest::meeting(const std::string& endpoint,
                                            int nnodes, int node_rank,
                                            const std::string& backend) {
  std::vector<std::string> options{"--nnodes=" + std::to_string(nnodes),
                                   "--rdzv-endpoint=" + endpoint};
  if (backend != "lockstep") options.push_back("--rdzv-backend=" + backend);
  if (node_rank >= 0) {
    options.push_back("--node-rank=" + std::to_string(node_rank));
  }
  return options;
}

std::vector<std::string> NodesTest::fixed(int port, int nnodes, int node_rank,
                                          const std::string& backend) {
  return {"--nnodes=" + std::to_string(nnodes), "--rdzv-backend=" + backend,
          "--node-rank=" + std::to_string(node_rank), "--master-addr=127.0.0.1",
          "--master-port=" + std::to_string(port)};
}

std::vector<std::string> NodesTest::with(std::vector<std::string> options,
                                         const std::vector<std::string>& more) {
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

pid_t NodesTest::agent_of(const RunningProgram& launcher) {
  const std::string& out = launcher.out();
  return std::stoi(out.substr(out.find("agent ") + 6));
}

void NodesTest::await_store(const std::string& endpoint) {
  const auto store = resolve(parse_endpoint("endpoint", endpoint, 0)).front();
  const Deadline deadline = Deadline::after(std::chrono::seconds(20));
  while (!accepts_connections(store, std::chrono::seconds(1))) {
    ASSERT_FALSE(deadline.expired()) << "no store came";
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace lockstep::internal::testing
