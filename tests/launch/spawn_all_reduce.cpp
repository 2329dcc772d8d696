// Ranks that this program spawns join a group without further settings:
// `spawn_all_reduce NPROCS [fail|fail-in-torch|catch]`. For
// spawn_torch_test.cpp.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/launch/spawn.h"

namespace {

// Returns whether it went well. The group is destroyed at the end, whatever
// happened.
bool train_and_catch(int rank) {
  auto group = lockstep::init_process_group();
  try {
    auto tensor = torch::ones({2});
    lockstep::all_reduce(tensor);
    if (rank == 1) throw std::runtime_error("no such file: x.csv");
    lockstep::all_reduce(tensor);
    return true;
  } catch (const std::exception& error) {
    std::printf("rank %d: %s\n", rank, error.what());
    std::fflush(stdout);  // on a busy machine spawn() may end it before exit()
    return false;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int nprocs = std::atoi(argv[1]);
  const bool fails = argc > 2;
  // Starts LibTorch's threads before the processes are made.
  auto warm = torch::ones({256, 256}).matmul(torch::ones({256, 256}));
  try {
    lockstep::spawn(
        [&](int rank) {
          if (fails && std::string(argv[2]) == "catch") {
            std::exit(train_and_catch(rank) ? 0 : 1);
          }
          auto group = lockstep::init_process_group("gloo");
          auto tensor = torch::full({2}, rank + 1.0);
          lockstep::all_reduce(tensor);
          std::printf("rank %d of %d has %g\n", lockstep::get_rank(),
                      lockstep::get_world_size(), tensor[0].item<double>());
          if (fails && rank == 1) {
            if (std::string(argv[2]) == "fail-in-torch") {
              torch::ones({2}).add(torch::ones({3}));
            }
            throw std::runtime_error("rank 1 had enough");
          }
          if (fails) lockstep::all_reduce(tensor);
        },
        nprocs);
  } catch (const lockstep::SpawnError& error) {
    std::printf("failed: %s\n", error.what());
    return 1;
  }
  std::printf("joined, %g\n", warm[0][0].item<double>());
}
