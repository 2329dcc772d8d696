// 05 Groups: an operation over some of the ranks. Here there are two groups of
// neighbours, like the ranks of two hosts, each with a sum of its own.
//
//   $ build/bin/05_groups
//   rank 0 is rank 0 of 1 in its group; sum of the group's ranks: 0
//
//   $ build/bin/lockstep run --nproc-per-node=2 build/bin/05_groups
//   rank 0 is rank 0 of 1 in its group; sum of the group's ranks: 0
//   rank 1 is rank 0 of 1 in its group; sum of the group's ranks: 1
//
//   $ build/bin/lockstep run --nproc-per-node=4 build/bin/05_groups
//   rank 0 is rank 0 of 2 in its group; sum of the group's ranks: 1
//   rank 1 is rank 1 of 2 in its group; sum of the group's ranks: 1
//   rank 2 is rank 0 of 2 in its group; sum of the group's ranks: 5
//   rank 3 is rank 1 of 2 in its group; sum of the group's ranks: 5

#include <algorithm>
#include <cstdio>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main() {
  auto everyone = lockstep::init_process_group();
  const int rank = lockstep::get_rank();
  const int world_size = lockstep::get_world_size();

  // Every rank calls this. It makes all the groups and returns this rank's own.
  // new_group({0, 3}) would make a group of ranks 0 and 3.
  auto group = lockstep::new_subgroups(std::max(world_size / 2, 1));

  auto sum = torch::tensor(rank);
  lockstep::all_reduce(sum, {.group = group});

  // Only for printing: rank 0 of everyone gets one row from each rank.
  auto row = torch::stack(
      {torch::tensor(group->rank()), torch::tensor(group->size()), sum});
  std::vector<torch::Tensor> rows;
  if (rank == 0) rows.assign(world_size, torch::Tensor());
  for (auto& each : rows) each = torch::empty_like(row);
  lockstep::gather(row, rows, /*dst=*/0);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::printf(
        "rank %zu is rank %d of %d in its group; sum of the group's ranks: "
        "%d\n",
        i, rows[i][0].item<int>(), rows[i][1].item<int>(),
        rows[i][2].item<int>());
  }
}
