// 01 Process group: the ranks of a job, and one operation that they make
// together. Every rank has its own loss; reduce() adds the losses up on rank 0.
//
//   $ build/bin/01_process_group
//   1 rank: mean loss 1.00
//
//   $ build/bin/lockstep run --nproc-per-node=2 build/bin/01_process_group
//   2 ranks: mean loss 1.50

#include <cstdio>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main() {
  // Environment variables, set by `lockstep run`, say which rank this is and
  // where the others are. Without them the process is a world of its own.
  auto group = lockstep::init_process_group();
  const int rank = lockstep::get_rank();              // 0, 1, ...
  const int world_size = lockstep::get_world_size();  // number of ranks

  auto loss = torch::tensor(1.0 + rank);
  lockstep::reduce(loss, /*dst=*/0);  // the sum, on rank 0 only
  if (rank == 0) {
    std::printf("%d rank%s: mean loss %.2f\n", world_size,
                world_size == 1 ? "" : "s", loss.item<double>() / world_size);
  }
}  // the group ends with its guard: all ranks leave together
