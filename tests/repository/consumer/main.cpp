// The program that README.md shows, with options given by name: their
// aggregates must not cause warnings under a user's -Wextra -Werror. With
// "spawn" it spawns two ranks of its own, with "sharded" it trains with more of
// the installed library, with "data" it reads a file and logs; any other
// argument is the backend.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

int train(const std::string& backend = {}) {
  auto group = lockstep::init_process_group(backend);

  lockstep::TensorDataset dataset(torch::randn({64, 4}), torch::randn({64, 1}));
  torch::nn::Linear layer(4, 1);
  lockstep::DistributedDataParallel<torch::nn::Linear> model(
      layer, {.bucket_cap_mb = 25});
  torch::optim::Adam optimizer(model->parameters());
  lockstep::DistributedSampler sampler(dataset, {.seed = 0});
  lockstep::DataLoader loader(dataset, sampler, {.batch_size = 8});
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : loader) {
      optimizer.zero_grad();
      auto loss = torch::mse_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
    }
  }
  auto total = torch::ones({1});
  lockstep::all_reduce(total, {.op = lockstep::ReduceOp::SUM});
  std::printf("rank %d of %d trained\n", lockstep::get_rank(),
              total.item<int>());
  return total.item<int>() == lockstep::get_world_size() ? 0 : 1;
}

int train_sharded() {
  auto group = lockstep::init_process_group();
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Linear(8, 1));
  lockstep::DistributedDataParallel<torch::nn::Sequential> model(net);
  lockstep::ZeroRedundancyOptimizer<lockstep::optim::AdamW> optimizer(
      model, {.lr = 1e-3}, {.cut_parameters = false});
  lockstep::GradScaler scaler({.device = torch::kCPU, .init_scale = 8});
  auto loss = [&] {
    lockstep::Autocast cast(torch::kCPU, torch::kBFloat16);
    return model(torch::ones({2, 4})).to(torch::kFloat).sum();
  }();
  scaler.scale(loss).backward();
  scaler.unscale_(optimizer);
  lockstep::clip_grad_norm_(optimizer, 1.0);
  scaler.step(optimizer);
  scaler.update();
  std::printf("rank %d stepped its part\n", lockstep::get_rank());
  return std::isfinite(loss.item<float>()) ? 0 : 1;
}

// Reads the table `path`, finds no image in the folder `path`.images, and logs
// into the folder `path`.runs.
int read_data(const std::string& path) {
  std::ofstream(path) << "a,b,class\n1,2,0\n3,4,1\n";
  const lockstep::CsvDataset table(path, {.target = {"class"}});
  const lockstep::MapDataset doubled(
      table, [](const torch::Tensor& x) { return x * 2; });
  try {
    lockstep::MapDataset images(
        lockstep::ImageFolder(path + ".images", {.allow_empty = true}),
        lockstep::Compose(lockstep::Resize(8, {.antialias = false}),
                          lockstep::RandomCrop(8, {.padding = 1}),
                          lockstep::ToFloat()));
    images.get(0);
    return 1;
  } catch (const std::exception&) {
    std::printf("read %d rows\n", static_cast<int>(doubled.size()));
  }
  lockstep::SummaryWriter writer(path + ".runs", {.max_queue = 1});
  writer.add_scalar("rows", static_cast<double>(doubled.size()));
  writer.close();
  return doubled.get(1).data[1].item<float>() == 8 ? 0 : 1;
}

int main(int argc, char** argv) {
  const std::string how = argc > 1 ? argv[1] : "";
  if (how == "sharded") return train_sharded();
  if (how == "data") return read_data(argc > 2 ? argv[2] : "table.csv");
  if (how != "spawn") return train(how);
  lockstep::spawn([](int) { std::exit(train()); }, 2, {.join = true});
  std::puts("both ended well");
}
