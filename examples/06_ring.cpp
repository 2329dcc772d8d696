// 06 Point to point: a ring. Each rank sends the number that it holds to the
// rank on its right and receives one from the left, until it has had them all:
// an all_reduce made by hand, of messages between neighbours only.
//
//   $ build/bin/06_ring
//   1 rank: 0 steps, sum 1
//
//   $ build/bin/lockstep run --nproc-per-node=2 build/bin/06_ring
//   2 ranks: 1 step, sum 3
//
//   $ build/bin/lockstep run --nproc-per-node=4 build/bin/06_ring
//   4 ranks: 3 steps, sum 10

#include <cstdio>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main() {
  using Kind = lockstep::P2POp::Kind;
  auto group = lockstep::init_process_group();
  const int rank = lockstep::get_rank();
  const int world_size = lockstep::get_world_size();
  const int right = (rank + 1) % world_size;
  const int left = (rank + world_size - 1) % world_size;

  auto held = torch::tensor(rank + 1);
  auto sum = held.clone();
  const int steps = world_size - 1;
  for (int step = 0; step < steps; ++step) {
    auto arriving = torch::empty_like(held);
    // Both are started together. If each rank called send() first and then
    // recv(), all would wait for a neighbour that waits, too.
    auto works = lockstep::batch_isend_irecv(
        {{.op = Kind::isend, .tensor = held, .peer = right},
         {.op = Kind::irecv, .tensor = arriving, .peer = left}});
    for (auto& work : works) work->wait();
    sum += arriving;
    held = arriving;
  }

  if (rank == 0) {
    std::printf("%d rank%s: %d step%s, sum %d\n", world_size,
                world_size == 1 ? "" : "s", steps, steps == 1 ? "" : "s",
                sum.item<int>());
  }
}
