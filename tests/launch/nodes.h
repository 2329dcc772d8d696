#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/harness/free_port.h"
#include "tests/launch/launcher.h"

namespace lockstep::internal::testing {

// A test of several agents that run here as if each were on a host of its own.
class NodesTest : public LauncherTest {
 protected:
  // Sets LOCKSTEP_JOB_SECRET for the launchers that it starts.
  NodesTest();

  // Returns the options of one of `nnodes` nodes that meet at HOST:PORT;
  // without a node rank if it is below 0.
  static std::vector<std::string> meeting(
      const std::string& endpoint, int nnodes, int node_rank = -1,
      const std::string& backend = "lockstep");
  static std::vector<std::string> c10d(const std::string& endpoint, int nnodes,
                                       int node_rank = -1) {
    return meeting(endpoint, nnodes, node_rank, "c10d");
  }
  // Returns the options of nodes that meet at node rank 0, here 127.0.0.1.
  static std::vector<std::string> fixed(
      int port, int nnodes, int node_rank,
      const std::string& backend = "lockstep");

  // Returns `options` followed by `more`.
  static std::vector<std::string> with(std::vector<std::string> options,
                                       const std::vector<std::string>& more);

  // Returns the process id in the "agent PID" of a worker's output.
  static pid_t agent_of(const RunningProgram& launcher);

  // Waits until a process listens at the endpoint, this test's or another.
  void await_store() const { await_store(endpoint()); }
  static void await_store(const std::string& endpoint);

  // The endpoint of this test.
  std::string endpoint() const { return "[::1]:" + std::to_string(port_); }
  int port() const { return port_; }

 private:
  int port_ = free_port();
};

}  // namespace lockstep::internal::testing
