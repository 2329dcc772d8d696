#include <gtest/gtest.h>
#include <torch/torch.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/data/data_loader.h"
#include "lockstep/data/distributed_sampler.h"
#include "lockstep/data/tensor_dataset.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

WORLD_TEST(SamplerInAWorld, TakesItsPartFromTheDefaultGroup, 1, 2, 3) {
  auto group = init_process_group();
  DistributedSampler sampler(10);
  EXPECT_EQ(sampler.num_replicas(), world.size);
  EXPECT_EQ(sampler.rank(), world.rank);
  DistributedSampler named(10,
                           {.num_replicas = world.size, .rank = world.rank});
  EXPECT_EQ(sampler.indices(), named.indices());
  // Either option may be given without the other.
  EXPECT_EQ(DistributedSampler(10, {.num_replicas = 8}).rank(), world.rank);
}

WORLD_TEST(SamplerInAWorld, EvaluationSeesEachSampleOnce, 1, 2, 3) {
  auto group = init_process_group();
  TensorDataset dataset(torch::eye(17, torch::kLong), torch::arange(17));
  DistributedSampler sampler(17, {.shuffle = false, .pad = false});
  DataLoader loader(dataset, sampler, {.batch_size = 4, .num_workers = 1});
  torch::Tensor seen = torch::zeros({17}, torch::kLong);
  for (auto& batch : loader) seen += batch.data.sum(0);
  all_reduce(seen);
  EXPECT_TRUE(torch::equal(seen, torch::ones({17}, torch::kLong))) << seen;
}

}  // namespace
}  // namespace lockstep::internal
