// checkpoint() on GPUs computes the gradients of a plain call, dropout
// included, whose numbers come from the generator of the GPU.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "lockstep/amp/autocast.h"
#include "lockstep/parallel/checkpointing/checkpoint.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/fsdp/block_net.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal::testing {
namespace {

struct DroppingNetImpl : torch::nn::Module {
  explicit DroppingNetImpl(bool recomputes) : recomputes_(recomputes) {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(torch::nn::Linear(kWidth, kWidth));
      register_module("layer" + std::to_string(i), layers.back());
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      const auto run = [layer = layer.ptr()](const at::Tensor& in) {
        return torch::dropout(layer->forward(in).tanh(), 0.5, true);
      };
      x = recomputes_ ? checkpoint(run, x) : run(x);
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;

 private:
  bool recomputes_;
};
TORCH_MODULE(DroppingNet);

std::vector<at::Tensor> train(const World& world, bool recomputes,
                              bool autocast, const at::Device& device) {
  torch::manual_seed(4);
  DroppingNet net(recomputes);
  net->to(device);
  DistributedDataParallel<DroppingNet> model(net);
  torch::optim::SGD optimizer(net->parameters(), 0.5);
  torch::manual_seed(static_cast<uint64_t>(70 + world.rank));
  std::vector<at::Tensor> results;
  for (int step = 0; step < 3; ++step) {
    const auto x = torch::randn({5, kWidth}, device);
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const Autocast cast(device.type(), at::kBFloat16, autocast);
      loss = model(x).to(at::kFloat).square().mean();
    }
    loss.backward();
    optimizer.step();
    results.push_back(loss.detach());
  }
  for (const auto& value : values_of(net->parameters())) {
    results.push_back(value);
  }
  return results;
}

WORLD_TEST(SimgpuCheckpointing, DropsTheSameElementsAgain, 1, 2, 3) {
  with_delays([&](const at::Device& device) {
    for (const bool autocast : {false, true}) {
      const auto plain = train(world, false, autocast, device);
      const auto again = train(world, true, autocast, device);
      for (size_t i = 0; i < plain.size(); ++i) {
        EXPECT_TRUE(torch::equal(again[i], plain[i])) << i;
      }
    }
  });
}

// Calls units of FullyShard, which gather again for the recomputation.
struct CheckpointedNetImpl : torch::nn::Module {
  CheckpointedNetImpl(const at::Device& device, bool recomputes)
      : recomputes_(recomputes) {
    for (int i = 0; i < 3; ++i) {
      blocks.emplace_back([&] {
        Block block(kWidth);
        block->to(device, at::kDouble);
        return block;
      });
      register_module("block" + std::to_string(i), blocks.back().ptr());
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks)
      x = recomputes_ ? checkpoint(block, x) : block(x);
    return x;
  }
  std::vector<FullyShard<Block>> blocks;

 private:
  bool recomputes_;
};
TORCH_MODULE(CheckpointedNet);

WORLD_TEST(SimgpuCheckpointing, RecomputesUnitsOfFullyShard, 2, 3) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        torch::manual_seed(4);
        FullyShard<CheckpointedNet> model(
            [&] { return CheckpointedNet(device, !device.is_cpu()); });
        torch::optim::SGD optimizer(model->parameters(), 0.1);
        torch::manual_seed(static_cast<uint64_t>(70 + world.rank));
        for (int step = 0; step < 3; ++step) {
          const auto x = torch::randn({5, kWidth}, at::kDouble).to(device);
          optimizer.zero_grad();
          model(x).square().mean().backward();
          optimizer.step();
        }
        return values_of(model->parameters());
      },
      1e-12);
}

}  // namespace
}  // namespace lockstep::internal::testing
