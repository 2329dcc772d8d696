// Each hook trains a small network on the handwritten digits, and sends as many
// bytes as its formula says.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "examples/digits_dataset.h"
#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/comm_hooks/comm_hooks.h"
#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "lockstep/parallel/model_averaging/post_local_sgd_optimizer.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using testing::World;

constexpr int64_t kBatchSize = 32;  // on each rank
constexpr int64_t kSteps = 220;     // ten epochs

// 4,810 parameters: [64, 64], [64], [10, 64], [10].
constexpr int64_t kParameters = 64 * 64 + 64 + 10 * 64 + 10;
constexpr int64_t kPlainBytes = kParameters * 4;

torch::nn::Sequential make_net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Flatten(), torch::nn::Linear(64, 64),
                               torch::nn::ReLU(), torch::nn::Linear(64, 10));
}

const examples::Digits& digits() {
  static const auto read =
      examples::read_digits(LOCKSTEP_SOURCE_DIR "/datasets/digits/digits.csv");
  return read;
}

struct Outcome {
  double accuracy;      // on the test set
  int64_t early_bytes;  // sent in the second step's backward
  int64_t bytes;        // sent in the last step's backward
  int64_t step_bytes;   // sent by kSteps optimizer steps: averaged parameters
  bool replicas_equal;
};

struct Training {
  std::function<CommHook()> hook{};  // null means no hook
  std::function<std::shared_ptr<ModelAverager>()> averager{};
  double lr{0.1};
};

Outcome train(const World& world, const Training& training) {
  auto net = make_net();
  DistributedDataParallel<torch::nn::Sequential> model(net);
  if (training.hook) model.register_comm_hook(training.hook());
  std::shared_ptr<torch::optim::Optimizer> optimizer =
      std::make_shared<torch::optim::SGD>(
          net->parameters(),
          torch::optim::SGDOptions(training.lr).momentum(0.9));
  if (training.averager) {
    optimizer =
        std::make_shared<PostLocalSGDOptimizer>(optimizer, training.averager());
  }
  const auto& data = digits().train.data();
  const auto& target = digits().train.target();
  torch::manual_seed(4);  // the same order on all ranks
  auto order = torch::randperm(data.size(0));
  int64_t next = 0;
  Outcome outcome{};
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto taken = kBatchSize * world.size;
    if (next + taken > order.size(0)) {
      order = torch::randperm(data.size(0));
      next = 0;
    }
    auto rows = order.narrow(0, next + world.rank * kBatchSize, kBatchSize);
    next += taken;
    optimizer->zero_grad();
    auto loss = torch::nn::functional::cross_entropy(
        model(data.index_select(0, rows)), target.index_select(0, rows));
    CommBytes sent;
    loss.backward();
    outcome.bytes = sent.bytes();
    if (step == 1) outcome.early_bytes = sent.bytes();
    sent.reset();
    optimizer->step();
    outcome.step_bytes += sent.bytes();
  }
  torch::NoGradGuard no_grad;
  auto flat = torch::nn::utils::parameters_to_vector(net->parameters());
  auto of_rank_zero = flat.clone();
  broadcast(of_rank_zero, 0);
  auto equal = torch::tensor(of_rank_zero.equal(flat) ? 1 : 0);
  all_reduce(equal, {.op = ReduceOp::MIN});
  outcome.replicas_equal = equal.item<int>() == 1;
  auto guess = net->forward(digits().test.data()).argmax(1);
  outcome.accuracy =
      guess.eq(digits().test.target()).to(torch::kDouble).mean().item<double>();
  return outcome;
}

// The accuracy of plain averaging, which every hook must come close to.
constexpr double kAccuracy = 0.93;

Outcome expect_trained(const World& world, const CommHook& hook, int64_t bytes,
                       double lr = 0.1) {
  auto outcome = train(world, {.hook = [&] { return hook; }, .lr = lr});
  EXPECT_GE(outcome.accuracy, kAccuracy);
  EXPECT_EQ(outcome.bytes, bytes);
  EXPECT_TRUE(outcome.replicas_equal);
  return outcome;
}

WORLD_TEST(CommHooksOnDigits, Allreduce, 2) {
  auto group = init_process_group();
  auto plain = train(world, {});
  EXPECT_GE(plain.accuracy, 0.95);
  auto hooked = expect_trained(world, allreduce_hook(), kPlainBytes);
  EXPECT_NEAR(hooked.accuracy, plain.accuracy, 0.02);
}

WORLD_TEST(CommHooksOnDigits, HalfTypesSendHalf, 2) {
  auto group = init_process_group();
  expect_trained(world, fp16_compress_hook(), kPlainBytes / 2);
  expect_trained(world, bf16_compress_hook(), kPlainBytes / 2);
  expect_trained(world, fp16_compress_wrapper(allreduce_hook()),
                 kPlainBytes / 2);
}

WORLD_TEST(CommHooksOnDigits, QuantizationSendsAQuarter, 2) {
  auto group = init_process_group();
  expect_trained(world, quantization_pertensor_hook(), kParameters + 8);
  expect_trained(world, quantization_perchannel_hook(),
                 kParameters + 8 * ((kParameters + 511) / 512));
}

WORLD_TEST(CommHooksOnDigits, PowerSgdSendsItsFactors, 2) {
  auto group = init_process_group();
  for (int64_t rank : {1, 2}) {
    auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{
        .matrix_approximation_rank = rank, .start_power_sgd_iter = 10});
    auto outcome =
        expect_trained(world, power_sgd_hook(state),
                       4 * ((64 + 64) * rank + (10 + 64) * rank + 64 + 10));
    EXPECT_EQ(outcome.early_bytes, kPlainBytes);
  }
}

// In one matrix the layers lose their structure. So this hook needs a higher
// rank, and smaller steps, because more of a gradient is applied late.
WORLD_TEST(CommHooksOnDigits, BatchedPowerSgdSendsTwoSides, 2) {
  auto group = init_process_group();
  auto state = std::make_shared<PowerSGDState>(PowerSGDOptions{
      .matrix_approximation_rank = 4, .start_power_sgd_iter = 10});
  expect_trained(world, batched_power_sgd_hook(state), 4 * 2 * 70 * 4,
                 /*lr=*/0.04);
}

WORLD_TEST(CommHooksOnDigits, OverGlooAsWell, 2) {
  auto group = init_process_group("gloo");
  expect_trained(world, fp16_compress_hook(), kPlainBytes / 2);
  expect_trained(world, quantization_perchannel_hook(),
                 kParameters + 8 * ((kParameters + 511) / 512));
  expect_trained(world,
                 power_sgd_hook(std::make_shared<PowerSGDState>(
                     PowerSGDOptions{.start_power_sgd_iter = 10})),
                 4 * ((64 + 64) + (10 + 64) + 64 + 10));
}

// Each rank learns from its own batches only, which are half as many.
WORLD_TEST(CommHooksOnDigits, NoopTrainsReplicasApart, 2) {
  auto group = init_process_group();
  auto outcome = train(world, {.hook = noop_hook});
  EXPECT_GE(outcome.accuracy, 0.9);
  EXPECT_EQ(outcome.bytes, 0);
  EXPECT_FALSE(outcome.replicas_equal);
}

WORLD_TEST(CommHooksOnDigits, PostLocalSgdAveragesParametersNowAndThen, 2) {
  auto group = init_process_group();
  constexpr int64_t kWarmup = 20;
  constexpr int64_t kPeriod = 4;
  // Each rank trains alone between two averagings; the last averaging is at the
  // end.
  auto outcome = train(
      world,
      {.hook =
           [] {
             return post_local_sgd_hook(std::make_shared<PostLocalSGDState>(
                 PostLocalSGDOptions{.start_local_sgd_iter = kWarmup,
                                     .post_local_gradient_allreduce = false}));
           },
       .averager =
           [] {
             return std::make_shared<PeriodicModelAverager>(
                 PeriodicModelAveragerOptions{.period = kPeriod,
                                              .warmup_steps = kWarmup - 1});
           }});
  EXPECT_GE(outcome.accuracy, kAccuracy);
  EXPECT_EQ(outcome.early_bytes, kPlainBytes);
  EXPECT_EQ(outcome.bytes, 0);
  EXPECT_EQ(outcome.step_bytes,
            ((kSteps - kWarmup) / kPeriod + 1) * kPlainBytes);
  EXPECT_TRUE(outcome.replicas_equal);
}

// A user's hook is any function of a bucket, and its bytes are counted like
// others'. This one sends the largest tenth of the gradients, and the rest
// later.
WORLD_TEST(CommHooksOnDigits, AUsersOwnHook, 2) {
  auto group = init_process_group();
  std::map<size_t, at::Tensor> left_out;
  int64_t kept = 0;
  auto top_tenth = [&](GradBucket& bucket) {
    auto gradients = bucket.buffer();
    auto& rest =
        left_out.try_emplace(bucket.index(), torch::zeros_like(gradients))
            .first->second;
    gradients += rest;
    kept = gradients.numel() / 10;
    auto largest = std::get<1>(gradients.abs().topk(kept));
    auto mine = torch::stack(
        {largest.to(torch::kFloat), gradients.index_select(0, largest)});
    rest = gradients.index_fill(0, largest, 0);
    auto all = torch::empty({world.size, 2, kept});
    all_gather_into_tensor(all, mine);
    gradients.zero_();
    for (int64_t rank = 0; rank < world.size; ++rank) {
      gradients.index_add_(0, all[rank][0].to(torch::kLong),
                           all[rank][1] / world.size);
    }
    return completed_future(gradients);
  };
  auto outcome =
      train(world, {.hook = [&]() -> CommHook { return top_tenth; }});
  EXPECT_GE(outcome.accuracy, kAccuracy);
  EXPECT_EQ(outcome.bytes, kParameters / 10 * 8);
  EXPECT_TRUE(outcome.replicas_equal);
}

}  // namespace
}  // namespace lockstep::internal
