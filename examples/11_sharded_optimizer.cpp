// 11 A sharded optimizer: AdamW keeps two numbers for each parameter; here each
// rank keeps, and steps, a part of them. On one host the ranks also share one
// copy of the parameters, so that nothing is gathered back. If they cannot
// (GPUs, several hosts), a line says so, and each rank has its own copy.
//
//   $ build/bin/11_sharded_optimizer
//   cpu: 524800 bytes of optimizer state: 524800 on rank 0
//   loss 0.00, weights bit for bit as without sharding: yes
//
//   $ build/bin/lockstep run --nproc-per-node=2 build/bin/11_sharded_optimizer
//   cpu: 524800 bytes of optimizer state: 262656 on rank 0, 262144 on rank 1
//   loss 0.00, weights bit for bit as without sharding: yes

#include <cstdio>
#include <optional>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

using lockstep::optim::AdamW;
using Model = lockstep::DistributedDataParallel<torch::nn::Linear>;

torch::nn::Linear make_net() {
  torch::manual_seed(0);
  torch::nn::Linear net(1024, 64);
  net->to(lockstep::local_device());
  return net;
}

double train(Model& model, torch::optim::Optimizer& optimizer) {
  torch::manual_seed(1 + lockstep::get_rank());  // each rank has its own inputs
  auto x = torch::randn({64, 1024}).to(lockstep::local_device());
  torch::Tensor loss;
  for (int step = 0; step < 300; ++step) {
    optimizer.zero_grad();
    loss = torch::mse_loss(model(x), x.mean(1, true).expand({64, 64}));
    loss.backward();  // if sharded, averages only what this rank steps
    optimizer.step();
  }
  return loss.item<double>();
}

long state_bytes(const torch::optim::Optimizer& optimizer) {
  size_t bytes = 0;
  for (const auto& [parameter, state] : optimizer.state()) {
    auto& moments = static_cast<torch::optim::AdamWParamState&>(*state);
    bytes += moments.exp_avg().nbytes() + moments.exp_avg_sq().nbytes();
  }
  return static_cast<long>(bytes);
}

int main() {
  auto group = lockstep::init_process_group();
  Model plain_model(make_net()), model(make_net());
  AdamW plain(plain_model->parameters());
  std::optional<lockstep::ZeroRedundancyOptimizer<AdamW>> optimizer;
  try {
    lockstep::ZeroRedundancyOptions options{.shared_parameters = true};
    optimizer.emplace(model, AdamW::Options{}, options);
  } catch (const std::invalid_argument& error) {  // on all ranks or on none
    if (lockstep::get_rank() == 0) std::printf("%s\n", error.what());
    optimizer.emplace(model);
  }
  train(plain_model, plain);
  const double loss = train(model, *optimizer);
  optimizer->synchronize();  // before parameters are read outside of model(x)
  auto bytes = torch::zeros({lockstep::get_world_size()}, torch::kLong);
  bytes[lockstep::get_rank()] = state_bytes(optimizer->local_optimizer());
  lockstep::all_reduce(bytes = bytes.to(lockstep::local_device()));
  if (lockstep::get_rank() != 0) return 0;
  std::printf("%s: %ld bytes of optimizer state:",
              lockstep::local_device().str().c_str(), state_bytes(plain));
  for (int rank = 0; rank < bytes.size(0); ++rank) {
    std::printf("%s %ld on rank %d", rank == 0 ? "" : ",",
                bytes[rank].item<long>(), rank);
  }
  const bool equal = model.module()->weight.equal(plain_model.module()->weight);
  std::printf("\nloss %.2f, weights bit for bit as without sharding: %s\n",
              loss, equal ? "yes" : "no");
}
