// Mixed precision, gradient clipping, batch norms over ranks, averages of
// models and metrics give on devices what they give on the CPU.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/amp/autocast.h"
#include "lockstep/amp/clip_grad.h"
#include "lockstep/amp/grad_scaler.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/object_collectives.h"
#include "lockstep/metrics/metrics.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/model_averaging/averagers.h"
#include "lockstep/parallel/model_averaging/post_local_sgd_optimizer.h"
#include "lockstep/parallel/nn/convert_sync_batchnorm.h"
#include "lockstep/parallel/swa/averaged_model.h"
#include "tests/simulated_cuda/as_on_cpu.h"

namespace lockstep::internal {
namespace {

using testing::append_state;
using testing::bound_of_sums;
using testing::expect_as_on_cpu;
using testing::kDeviceBackend;
using testing::kDeviceType;
using testing::World;
using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;

Sequential make_net() {
  torch::manual_seed(8);
  return Sequential(Linear(6, 12), torch::nn::Tanh(), Linear(12, 12),
                    torch::nn::Tanh(), Linear(12, 2));
}

// One rank's infinity makes all ranks leave out the step.
WORLD_TEST(TrainingOnDevices, AScalerSkipsTheStepOfAllRanks, 2, 3) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        Sequential net = make_net();
        net->to(device);
        DistributedDataParallel<Sequential> model(net);
        optim::AdamW optimizer(net->parameters(), {.lr = 0.01});
        GradScaler scaler({.init_scale = 256, .growth_interval = 2});
        torch::manual_seed(100 + world.rank);
        std::vector<Tensor> results;
        for (int step = 0; step < 6; ++step) {
          optimizer.zero_grad();
          const Tensor x = torch::randn({4, 6}).to(device);
          scaler.scale(model(x).square().mean()).backward();
          if (step == 3 && world.rank == world.size - 1) {
            net->parameters()[2].mutable_grad()[0][1] =
                std::numeric_limits<float>::infinity();
          }
          scaler.unscale_(optimizer);
          results.push_back(clip_grad_norm_(net->parameters(), 0.5));
          scaler.step(optimizer);
          results.push_back(torch::tensor(scaler.found_inf(optimizer), device));
          scaler.update();
          results.push_back(torch::tensor(scaler.get_scale(), device));
          if (step == 3) {
            EXPECT_EQ(scaler.get_scale(), 256);
          }
          if (step != 3) append_state(*net, results);
        }
        return results;
      },
      world.size == 2 ? 0 : 1e-4);
}

WORLD_TEST(TrainingOnDevices, AutocastTrainsAsOnTheCpu, 2, 3) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        Sequential net = make_net();
        net->to(device);
        DistributedDataParallel<Sequential> model(net);
        optim::SGD optimizer(net->parameters(), {.lr = 0.05, .momentum = 0.9});
        torch::manual_seed(100 + world.rank);
        std::vector<Tensor> results;
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          const Tensor x = torch::randn({4, 6}).to(device);
          Tensor loss;
          {
            const Autocast mixed(device.type(), torch::kBFloat16);
            const Tensor out = model(x);
            EXPECT_EQ(out.scalar_type(), torch::kBFloat16);
            loss = torch::mse_loss(out, torch::zeros_like(out));
          }
          loss.backward();
          optimizer.step();
          results.push_back(loss.detach().to(torch::kFloat));
          append_state(*net, results);
        }
        return results;
      },
      2e-2);
}

WORLD_TEST(TrainingOnDevices, NormsOfGradientsAreThoseOfTheCpu, 2) {
  for (const double order :
       {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    expect_as_on_cpu(
        [&](const at::Device& device) {
          Sequential net = make_net();
          net[0]->to(torch::kDouble);
          net->to(device);
          torch::manual_seed(100 + world.rank);
          std::vector<Tensor> results;
          for (Tensor& parameter : net->parameters()) {
            parameter.mutable_grad() =
                torch::randn(parameter.sizes()).to(parameter.options());
          }
          results.push_back(get_total_norm(net->parameters(), order));
          results.push_back(clip_grad_norm_(net->parameters(), 0.7, order,
                                            /*error_if_nonfinite=*/true));
          clip_grad_value_(net->parameters(), 0.1);
          append_state(*net, results);
          return results;
        },
        1e-6);
  }
}

WORLD_TEST(TrainingOnDevices, SyncBatchNormTrainsAsOnTheCpu, 2, 3) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        torch::manual_seed(8);
        Sequential net(
            torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3).bias(false)),
            torch::nn::BatchNorm2d(4), torch::nn::Tanh(), torch::nn::Flatten(),
            Linear(4 * 4 * 4, 8), torch::nn::BatchNorm1d(8), Linear(8, 1));
        nn::convert_sync_batchnorm(*net);
        net->to(device);
        DistributedDataParallel<Sequential> model(net);
        torch::optim::SGD optimizer(net->parameters(), 0.05);
        torch::manual_seed(100 + world.rank);
        std::vector<Tensor> results;
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          // The last rank has no samples once.
          const int64_t rows =
              step == 2 && world.rank == world.size - 1 ? 0 : 2 + world.rank;
          const Tensor x = torch::randn({rows, 2, 6, 6}).to(device);
          model(x).square().sum().backward();
          append_state(*net, results);
          optimizer.step();
        }
        return results;
      },
      1e-4);
}

WORLD_TEST(TrainingOnDevices, AveragedModelsAreThoseOfTheCpu, 2, 3) {
  for (const bool on_cpu : {false, true}) {
    expect_as_on_cpu(
        [&](const at::Device& device) {
          Sequential net = make_net();
          net->to(device);
          DistributedDataParallel<Sequential> model(net);
          AveragedModelOptions options{.avg_fn = get_ema_avg_fn(0.9)};
          if (on_cpu) options.device = torch::kCPU;
          AveragedModel<Sequential> average(net, options);
          const auto optimizer = std::make_shared<torch::optim::SGD>(
              net->parameters(), torch::optim::SGDOptions(0.05));
          PostLocalSGDOptimizer stepping(
              optimizer, std::make_shared<PeriodicModelAverager>(
                             PeriodicModelAveragerOptions{.period = 2,
                                                          .warmup_steps = 1}));
          torch::manual_seed(100 + world.rank);
          std::vector<Tensor> results;
          for (int step = 0; step < 5; ++step) {
            stepping.zero_grad();
            const Tensor x = torch::randn({4, 6}).to(device);
            const auto guard = model.no_sync();
            model(x).square().mean().backward();
            stepping.step();
            average.update_parameters(model);
            append_state(*net, results);
          }
          std::vector<Tensor> averages;
          append_state(*average.module(), averages);
          for (const Tensor& one : averages) results.push_back(one.to(device));
          EXPECT_EQ(average.n_averaged(), 5);
          return results;
        },
        bound_of_sums(world));
  }
}

WORLD_TEST(TrainingOnDevices, MetricsAreThoseOfTheCpu, 2, 3) {
  expect_as_on_cpu(
      [&](const at::Device& device) {
        torch::manual_seed(100 + world.rank);
        metrics::Mean mean;
        metrics::Sum sum;
        metrics::Perplexity perplexity;
        metrics::Accuracy accuracy({.top_k = 2});
        metrics::ConfusionMatrix matrix({.num_classes = 5});
        for (int batch = 0; batch < 3 + world.rank; ++batch) {
          const Tensor scores = torch::randn({4, 5}).to(device);
          const Tensor target = torch::randint(5, {4}).to(device);
          const Tensor weights = torch::rand({4}).to(device);
          mean.update(scores.select(1, 0), weights);
          sum.update(scores);
          perplexity.update(scores, target);
          accuracy.update(scores, target);
          matrix.update(scores, target);
        }
        std::vector<Tensor> results{
            torch::tensor({mean.compute(), sum.compute(), perplexity.compute(),
                           accuracy.compute()},
                          torch::kDouble),
            matrix.compute()};
        for (Tensor& result : results) result = result.to(device);
        return results;
      },
      0);
}

// Threads other than the main one have device 0 as their current device, so
// that collectives of the library's own numbers were refused on other ranks.
WORLD_TEST(TrainingOnDevices, AnyThreadUsesTheDeviceOfTheRank, 2, 3) {
  const auto group = init_process_group(kDeviceBackend);
  EXPECT_EQ(local_device(), torch::Device(kDeviceType, world.rank));
  EXPECT_EQ(torch::empty({1}, kDeviceType).device(), local_device());
  std::vector<Object> all;
  std::thread([&] { all = all_gather_object(Object(world.rank)); }).join();
  ASSERT_EQ(all.size(), world.size);
  EXPECT_EQ(all.back(), world.size - 1);
}

}  // namespace
}  // namespace lockstep::internal
