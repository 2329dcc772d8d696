// 02 DDP in ten lines: each rank computes the gradients of its own part of a
// batch, DistributedDataParallel averages them, and every rank makes the same
// step. So two ranks find the line that one rank finds with the whole batch.
//
//   $ build/bin/02_ddp
//   1 rank, 8 points each: y = 2.00 x + 1.00
//
//   $ build/bin/lockstep run --nproc-per-node=2 build/bin/02_ddp
//   2 ranks, 4 points each: y = 2.00 x + 1.00

#include <cstdio>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

int main() {
  auto group = lockstep::init_process_group();
  const int rank = lockstep::get_rank();
  const int world_size = lockstep::get_world_size();

  // Eight points of y = 2x + 1; rank r of n takes points r, r + n, r + 2n, ...
  auto x = torch::linspace(-1, 1, 8).unsqueeze(1);
  x = x.index(
      {torch::indexing::Slice(rank, torch::indexing::None, world_size)});
  auto y = 2 * x + 1;

  // The wrapper gives every rank the parameters of rank 0.
  lockstep::DistributedDataParallel<torch::nn::Linear> model(
      torch::nn::Linear(1, 1));
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.5);
  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(model(x), y);
    loss.backward();  // gradients are averaged when this returns
    optimizer.step();
  }

  if (rank == 0) {
    std::printf("%d rank%s, %ld points each: y = %.2f x + %.2f\n", world_size,
                world_size == 1 ? "" : "s", static_cast<long>(x.size(0)),
                model.module()->weight.item<double>(),
                model.module()->bias.item<double>());
  }
}
