// Two peers for `lockstep bench` without LibTorch: protocol_peer SIDE
// TIMEOUT_MS, with WORLD_SIZE in the environment. It forks its ranks.
//
//   protocol  shm::Group, called directly on ordinary memory
//   kernel    the kernel that the protocol calls on registered memory, on all
//             ranks at the same time and without synchronisation: what the
//             protocol could reach if waiting were free

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "benchmarks/plain_peers/board.h"
#include "benchmarks/plain_peers/kernel_reducer.h"
#include "benchmarks/plain_peers/protocol_reducer.h"
#include "benchmarks/plain_peers/serve.h"
#include "lockstep/base/environment.h"
#include "lockstep/base/file_descriptor.h"

namespace {

using lockstep::internal::bench::Board;

// Forks the other ranks, as children of rank 0. Returns the rank of the process
// in which it returns.
int fork_ranks(int ranks) {
  const pid_t first = getpid();
  for (int rank = 1; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) lockstep::internal::throw_errno("fork");
    if (pid > 0) continue;
    // Only rank 0 reads requests, and no other rank may outlive it.
    close(STDIN_FILENO);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != first) _exit(1);
    return rank;
  }
  return 0;
}

void run(const std::string& side, std::chrono::milliseconds timeout, int ranks,
         Board& board, int rank) {
  using namespace lockstep::internal::bench;
  if (side == "kernel") {
    KernelReducer reducer(board, rank, ranks, timeout);
    return serve(reducer);
  }
  if (side != "protocol") {
    throw std::invalid_argument("no side \"" + side +
                                "\"; allowed are protocol and kernel");
  }
  ProtocolReducer reducer(board, rank, ranks, timeout);
  serve(reducer);
}

}  // namespace

int main(int argc, char** argv) {
  int rank = 0;
  try {
    if (argc != 3) throw std::invalid_argument("give SIDE and TIMEOUT_MS");
    const std::chrono::milliseconds timeout(lockstep::internal::parse_int(
        "TIMEOUT_MS", argv[2], 1, int64_t{1} << 40));
    const auto ranks = lockstep::internal::get_env_int("WORLD_SIZE", 1, 64);
    if (!ranks) throw std::invalid_argument("WORLD_SIZE is not set");
    Board board;
    rank = fork_ranks(static_cast<int>(*ranks));
    run(argv[1], timeout, static_cast<int>(*ranks), board, rank);
    return 0;
  } catch (const std::exception& error) {
    // If several ranks fail, rank 0 speaks for all.
    if (rank == 0) lockstep::internal::bench::say_failure(error);
    return 1;
  }
}
