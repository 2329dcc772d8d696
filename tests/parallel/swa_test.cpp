// Averaged weights and the statistics of batch norms, over ranks.
// scheduler_parity_test.cpp compares the numbers with Python's.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/checkpoint/full_state_dict.h"
#include "lockstep/checkpoint/module_state.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/placement.h"
#include "lockstep/optim/sgd.h"
#include "lockstep/parallel/nn/sync_batch_norm.h"
#include "lockstep/parallel/swa/averaged_model.h"
#include "lockstep/parallel/swa/update_bn.h"
#include "lockstep/parallel/zero/zero_redundancy_optimizer.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/zero_training.h"

namespace lockstep::internal {
namespace {

using namespace lockstep::internal::testing;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::nn::Linear;
using torch::nn::Sequential;

at::Tensor flat(const torch::nn::Module& module) {
  return flat_parameters(module).clone();
}

// Trains a wrapped model and returns the exponential average of its parameters;
// `after_step` runs before each update.
template <class Optimizer, class AfterStep>
at::Tensor average_of(DistributedDataParallel<ZeroNet>& model,
                      Optimizer& optimizer, const AfterStep& after_step) {
  AveragedModel<ZeroNet> average(model.module(),
                                 std::make_shared<ZeroNetImpl>(),
                                 {.avg_fn = get_ema_avg_fn(0.5)});
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    zero_loss(model(zero_batch(step, get_rank(), torch::kFloat))).backward();
    optimizer.step();
    after_step();
    average.update_parameters(model);
  }
  EXPECT_EQ(average.n_averaged(), 6);
  return flat(*average.module());
}

WORLD_TEST(AveragedModel, EachRankHasTheSameAverageWithoutCommunication, 1, 2,
           3) {
  auto group = init_process_group();
  ZeroNet net;
  DistributedDataParallel<ZeroNet> model(net);
  optim::SGD optimizer(net->parameters(), {.lr = 0.1, .momentum = 0.9});
  at::Tensor expected;
  const at::Tensor average = average_of(model, optimizer, [&] {
    const at::Tensor now = flat(*net);
    expected = expected.defined() ? 0.5 * expected + 0.5 * now : now;
  });
  EXPECT_TRUE(average.equal(expected));
  EXPECT_FALSE(average.equal(flat(*net)));
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world.size; ++rank) {
    all.push_back(torch::empty_like(average));
  }
  all_gather(all, average);
  for (const auto& other : all) EXPECT_TRUE(other.equal(average));
}

WORLD_TEST(AveragedModel, SharedParametersAreCompleteAfterSynchronize, 2, 3) {
  auto group = init_process_group();
  ZeroNet net, same;
  DistributedDataParallel<ZeroNet> model(net), plain_model(same);
  optim::SGD plain(same->parameters(), {.lr = 0.1, .momentum = 0.9});
  const at::Tensor expected = average_of(plain_model, plain, [] {});
  for (const bool shared : {false, true}) {
    ZeroNet own;
    DistributedDataParallel<ZeroNet> wrapped(own);
    ZeroRedundancyOptimizer<optim::SGD> sharded(
        wrapped, {.lr = 0.1, .momentum = 0.9}, {.shared_parameters = shared});
    EXPECT_TRUE(average_of(wrapped, sharded, [&] {
                  sharded.synchronize();
                }).equal(expected));
  }
}

// Regression: a clone forgot what set_placement() had said of the original, so
// that a snapshot had the average of one rank's part.
WORLD_TEST(AveragedModel, PlacementsHoldForTheAverage, 1, 2) {
  auto group = init_process_group();
  torch::manual_seed(3);
  Linear part(3, 2);
  set_placement(part->weight, lockstep::Shard{.dim = 0});
  AveragedModel<Linear> average(part);
  average.update_parameters(part);
  const auto whole = full_state_dict(*average.module());
  if (world.rank > 0) return;
  EXPECT_EQ(whole[0].first, "weight");
  EXPECT_EQ(whole[0].second.size(0), 2 * world.size);
}

struct Tied : torch::nn::Module {
  Tied() {
    first = register_parameter("first", torch::ones({2}));
    second = register_parameter("second", first);
  }
  at::Tensor forward() { return first + second; }
  at::Tensor first, second;
};

// LibTorch lists a tied weight twice; two updates in one would count it twice.
WORLD_TEST(AveragedModel, TiedWeightsAreAveragedOnce, 1) {
  const auto model = std::make_shared<Tied>();
  AveragedModel<Tied> average(model, std::make_shared<Tied>());
  const torch::NoGradGuard no_grad;
  for (const double value : {1.0, 2.0, 6.0}) {
    model->first.fill_(value);
    average.update_parameters(*model);
  }
  EXPECT_EQ(average.module()->first[0].item<double>(), 3);
  EXPECT_EQ(average()[0].item<double>(), 6);
}

WORLD_TEST(AveragedModel, ItsConstructorCopiesAndDrawsNothing, 1) {
  torch::manual_seed(3);
  Sequential model(Linear(3, 2), torch::nn::BatchNorm1d(2));
  model->eval();
  torch::manual_seed(7);
  AveragedModel<Sequential> cloned(model);
  const at::Tensor drawn = torch::rand({3});
  torch::manual_seed(7);
  EXPECT_TRUE(drawn.equal(torch::rand({3})));
  EXPECT_TRUE(flat(*cloned.module()).equal(flat(*model)));
  EXPECT_FALSE(cloned.module()->is_training());
  // The values are copied: the average has memory of its own.
  torch::NoGradGuard no_grad;
  model->parameters()[0].add_(1);
  EXPECT_FALSE(flat(*cloned.module()).equal(flat(*model)));

  const auto plain = std::make_shared<Tied>();
  EXPECT_THAT([&] { AveragedModel<Tied> average(plain); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("AveragedModel cannot copy")));
  plain->first.fill_(5);
  AveragedModel<std::shared_ptr<Tied>> given(plain, std::make_shared<Tied>());
  EXPECT_EQ(given.module()->first[0].item<double>(), 5);
}

WORLD_TEST(AveragedModel, ItsStateGoesOn, 1) {
  Sequential model(Linear(3, 2), torch::nn::BatchNorm1d(2));
  AveragedModel<Sequential> first(model), second(model);
  const torch::NoGradGuard no_grad;
  for (int step = 0; step < 6; ++step) {
    model->parameters()[0].add_(step);
    if (step == 3) load_state_dict(second, state_dict(first));
    first.update_parameters(model);
    if (step >= 3) second.update_parameters(model.ptr());
  }
  EXPECT_EQ(second.n_averaged(), 6);
  EXPECT_EQ(state_dict(first).front().first, "n_averaged");
  EXPECT_EQ(state_dict(first)[1].first, "module.0.weight");
  EXPECT_TRUE(flat(*first.module()).equal(flat(*second.module())));
}

WORLD_TEST(AveragedModel, MistakesAreNamedAndChangeNothing, 1) {
  Sequential model(Linear(3, 2)), wide(Linear(4, 2)),
      long_one(Linear(3, 2), Linear(2, 2));
  AveragedModel<Sequential> average(model);
  const at::Tensor before = flat(*average.module());
  EXPECT_THAT([&] { average.update_parameters(wide); },
              ThrowsMessage<std::invalid_argument>(HasSubstr(
                  "parameters has the sizes [2, 4], its average [2, 3]")));
  EXPECT_THAT([&] { average.update_parameters(*long_one); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("has 4 parameters, its average 2")));
  EXPECT_EQ(average.n_averaged(), 0);
  EXPECT_TRUE(flat(*average.module()).equal(before));
  EXPECT_THAT([&] { AveragedModel<Sequential> made(model, wide); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("sizes")));
  for (const double decay : {-0.1, 1.1, std::nan("")}) {
    EXPECT_THAT([&] { get_ema_avg_fn(decay); },
                ThrowsMessage<std::invalid_argument>(HasSubstr("from 0 to 1")));
  }
}

struct Example {
  at::Tensor data, target;
};

at::Tensor rows(int64_t from, int64_t to) {
  return torch::sin(torch::arange(600, at::kDouble) * 0.7)
      .view({200, 3})
      .slice(0, from, to);
}

// Each rank has its part of each batch; the statistics are those of one process
// with whole batches.
WORLD_TEST(UpdateBn, SyncBatchNormHasTheStatisticsOfAllRanks, 1, 2, 3) {
  auto group = init_process_group();
  Sequential synchronised(Linear(3, 4), nn::SyncBatchNorm1d(4));
  Sequential whole(Linear(3, 4), torch::nn::BatchNorm1d(4));
  synchronised->to(at::kDouble);
  whole->to(at::kDouble);
  {
    const torch::NoGradGuard no_grad;
    for (const auto& model : {synchronised, whole}) {
      model->parameters()[0].fill_(0.5);
      model->parameters()[1].fill_(0.1);
    }
  }
  std::vector<Example> mine;
  std::vector<at::Tensor> all;
  for (int batch = 0; batch < 4; ++batch) {
    const int64_t begin = int64_t{12} * batch;
    const int64_t size = 12 / world.size;
    mine.push_back(
        {rows(begin + world.rank * size, begin + (world.rank + 1) * size), {}});
    all.push_back(rows(begin, begin + 12));
  }
  synchronised->eval();
  synchronised[1]->train();
  update_bn(mine, synchronised);
  update_bn(all, *whole);
  const auto& ours = *synchronised[1]->as<nn::SyncBatchNorm1d>();
  const auto& theirs = *whole[1]->as<torch::nn::BatchNorm1d>();
  EXPECT_TRUE(ours.running_mean.allclose(theirs.running_mean, 1e-12, 1e-12));
  EXPECT_TRUE(ours.running_var.allclose(theirs.running_var, 1e-12, 1e-12));
  // The numbers are the plain averages over the batches.
  at::Tensor mean = torch::zeros({4}, at::kDouble);
  for (const auto& batch : all) {
    mean += whole[0]->as<Linear>()->forward(batch).mean(0).detach() / 4;
  }
  EXPECT_TRUE(theirs.running_mean.allclose(mean, 1e-12, 1e-12));
  EXPECT_EQ(ours.options.momentum(), 0.1);
  EXPECT_EQ(theirs.options.momentum(), 0.1);
  EXPECT_FALSE(synchronised->is_training());
  EXPECT_TRUE(whole->is_training());
}

// Regression: the wrapper's forward sent its buffers, so that the rank waited
// for the others.
WORLD_TEST(UpdateBn, OneRankMayDoItForADistributedDataParallel, 2) {
  auto group = init_process_group();
  Sequential net(Linear(3, 4), torch::nn::BatchNorm1d(4));
  net->to(at::kDouble);
  DistributedDataParallel<Sequential> model(net);
  model(rows(0, 8)).sum().backward();
  const std::vector<at::Tensor> batches{rows(8, 12), rows(12, 20)};
  if (world.rank == 0) update_bn(batches, model);
  barrier();
  const torch::NoGradGuard no_grad;
  model->eval();
  model(rows(0, 4));  // sends the buffers of rank 0
  at::Tensor mean = torch::zeros({4}, at::kDouble);
  for (const auto& batch : batches) {
    mean += net[0]->as<Linear>()->forward(batch).mean(0) / 2;
  }
  EXPECT_TRUE(net[1]->as<torch::nn::BatchNorm1d>()->running_mean.allclose(
      mean, 1e-12, 1e-12));
}

WORLD_TEST(UpdateBn, WithoutBatchNormNothingIsDone, 1) {
  const auto model = std::make_shared<Tied>();
  std::vector<at::Tensor> none;
  // Tied::forward takes no input, so a batch would not compile.
  const FreshStatistics statistics(*model);
  EXPECT_FALSE(statistics.any());
  Sequential plain(Linear(3, 2));
  struct Never {
    const at::Tensor* begin() const { throw std::logic_error("was read"); }
    const at::Tensor* end() const { return nullptr; }
  };
  update_bn(Never(), plain);
}

// The second registration finds the momentum of none that the first one left.
WORLD_TEST(UpdateBn, ABatchNormThatIsRegisteredTwiceKeepsItsMomentum, 1) {
  torch::nn::BatchNorm1d norm(torch::nn::BatchNormOptions(3).momentum(0.3));
  Sequential model(norm, norm);
  update_bn(std::vector<at::Tensor>{torch::rand({4, 3})}, model);
  EXPECT_EQ(norm->options.momentum(), 0.3);
}

WORLD_TEST(UpdateBn, AForwardThatThrowsRestoresMomentumAndMode, 1) {
  Sequential model(
      torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(3).momentum(0.3)));
  model->eval();
  EXPECT_ANY_THROW(
      update_bn(std::vector<at::Tensor>{torch::ones({2, 5})}, model));
  EXPECT_FALSE(model->is_training());
  EXPECT_EQ(model[0]->as<torch::nn::BatchNorm1d>()->options.momentum(), 0.3);
}

}  // namespace
}  // namespace lockstep::internal
