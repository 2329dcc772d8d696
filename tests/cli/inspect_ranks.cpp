// Ranks for inspect_ranks_test.cpp, which diverge, and for jobs_test.cpp:
// `lockstep run --nproc-per-node=3 inspect_ranks absent|stuck|different|late`.
// With "late", rank 1 is late for each of many collectives. Each rank prints
// "ready <rank> <pid>" when it has come to the point that the test needs, or
// "failed <rank> <error>", and stays until it is killed, a minute at most.
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <thread>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/observe/progress_bar.h"

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

void say_ready(int rank) {
  std::printf("ready %d %d\n", rank, static_cast<int>(::getpid()));
  std::fflush(stdout);
}

void stay() { std::this_thread::sleep_for(seconds(60)); }

}  // namespace

int main(int, char** argv) {
  const std::string mode = argv[1];
  auto group = lockstep::init_process_group(
      "gloo", {.timeout = seconds(50), .check_calls = mode == "different"});
  const int rank = lockstep::get_rank();
  auto tensor = torch::ones({1000});
  lockstep::all_reduce(tensor);
  if (mode == "late") {
    say_ready(rank);
    lockstep::ProgressBar bar(1'000, {.line_interval = milliseconds(100)});
    for (int i = 0; i < 1'000; ++i) {
      if (rank == 1) std::this_thread::sleep_for(milliseconds(20));
      lockstep::all_reduce(tensor);
      bar.update();
    }
  }
  const int other = mode == "absent" ? 2 : 1;
  try {
    if (mode == "different" && rank == other) {
      lockstep::broadcast(tensor, 0);
    } else if (rank == other) {
      say_ready(rank);
      stay();
    } else {
      if (mode == "stuck") say_ready(rank);
      lockstep::all_reduce(
          tensor,
          {.timeout = mode == "absent" ? std::optional(milliseconds(500))
                                       : std::nullopt});
    }
  } catch (const std::exception& error) {
    std::printf("failed %d %s\n", rank, error.what());
    std::fflush(stdout);
    stay();
  }
  ::_exit(0);
}
