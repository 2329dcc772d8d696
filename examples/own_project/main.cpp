// A minimal training. Run it alone, or by
// `lockstep run --nproc-per-node=2 ./train`.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  auto group = lockstep::init_process_group();
  torch::manual_seed(0);
  lockstep::TensorDataset dataset(torch::ones({64, 4}), torch::ones({64, 1}));
  lockstep::DistributedSampler sampler(dataset);
  lockstep::DataLoader loader(dataset, sampler, {.batch_size = 8});
  lockstep::DistributedDataParallel<torch::nn::Linear> model(
      torch::nn::Linear(4, 1));
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.1);
  for (auto& batch : loader) {
    optimizer.zero_grad();
    torch::mse_loss(model(batch.data), batch.target).backward();
    optimizer.step();
  }
  std::printf("rank %d of %d has trained\n", group->rank(), group->size());
}
