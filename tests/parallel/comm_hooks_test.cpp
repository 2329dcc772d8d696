// Calls the hooks with buckets made by the test, and compares with formulas.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/comm_hooks/comm_hooks.h"
#include "lockstep/parallel/comm_hooks/hook_collectives.h"
#include "tests/harness/process_world.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Returns a group over shared memory, whose ranks reduce in their own thread,
// and one of a backend whose operations run in other threads. Collective.
std::vector<ProcessGroupPtr> both_ways() {
  return {default_group(), new_group({}, {.backend = "gloo"})};
}

using Shapes = std::vector<std::vector<int64_t>>;

GradBucket make_bucket(const at::Tensor& flat, const Shapes& shapes,
                       size_t index = 0, bool is_last = true) {
  std::vector<at::Tensor> gradients;
  int64_t offset = 0;
  for (const auto& shape : shapes) {
    const auto count = c10::multiply_integers(shape);
    gradients.push_back(flat.narrow(0, offset, count).view(shape));
    offset += count;
  }
  return GradBucket(index, is_last, flat, std::move(gradients), {});
}

at::Tensor gradients_of(int rank, int64_t count, int seed = 0) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * seed + rank);
  return torch::randn({count}, generator);
}

std::vector<at::Tensor> of_all_ranks(int size, int64_t count, int seed = 0) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < size; ++rank) {
    all.push_back(gradients_of(rank, count, seed));
  }
  return all;
}

at::Tensor mean_of(int size, int64_t count, int seed = 0) {
  return torch::stack(of_all_ranks(size, count, seed)).mean(0);
}

at::Tensor run(const CommHook& hook, GradBucket bucket) {
  return wait_for_tensor(hook(bucket));
}

double worst(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(torch::kFloat) - b).abs().max().item<double>();
}

WORLD_TEST(CommHooks, AllreduceAverages, 1, 2, 3) {
  auto world_group = init_process_group();
  for (const auto& group : both_ways()) {
    auto bucket = make_bucket(gradients_of(world.rank, 50), {{5, 10}});
    auto result = run(allreduce_hook(group), bucket);
    EXPECT_TRUE(result.is_same(bucket.buffer()));
    EXPECT_LE(worst(result, mean_of(world.size, 50)), 1e-6);
  }
}

WORLD_TEST(CommHooks, HalfTypesRoundThenDivideThenSum, 1, 2) {
  auto world_group = init_process_group();
  for (const auto& group : both_ways()) {
    auto expect = [&](const CommHook& hook, torch::ScalarType dtype) {
      auto sum = torch::zeros({50}, dtype);
      for (const auto& one : of_all_ranks(world.size, 50)) {
        sum += one.to(dtype).div_(world.size);
      }
      auto bucket = make_bucket(gradients_of(world.rank, 50), {{5, 10}});
      auto result = run(hook, bucket);
      EXPECT_EQ(result.scalar_type(), torch::kFloat);
      EXPECT_TRUE(result.equal(sum.to(torch::kFloat)));
    };
    expect(fp16_compress_hook(group), torch::kHalf);
    expect(bf16_compress_hook(group), torch::kBFloat16);
    expect(fp16_compress_wrapper(allreduce_hook(group)), torch::kHalf);
    expect(bf16_compress_wrapper(allreduce_hook(group)), torch::kBFloat16);
  }
}

WORLD_TEST(CommHooks, AWrappedHookSeesHalfGradientsOnly, 1) {
  auto group = init_process_group("gloo");
  auto flat = torch::arange(8, torch::kFloat);
  auto bucket = make_bucket(flat, {{2, 3}, {2}});
  auto hook = fp16_compress_wrapper([](GradBucket& inner) {
    EXPECT_EQ(inner.buffer().scalar_type(), torch::kHalf);
    EXPECT_EQ(inner.gradients()[0].scalar_type(), torch::kHalf);
    EXPECT_EQ(inner.gradients()[0].sizes(), at::IntArrayRef({2, 3}));
    EXPECT_EQ(inner.gradients()[1][1].item<double>(), 7);
    inner.gradients()[0].mul_(10);
    return completed_future(inner.buffer());
  });
  EXPECT_TRUE(wait_for_tensor(hook(bucket)).is_same(flat));
  EXPECT_EQ(flat[5].item<double>(), 50);
  EXPECT_EQ(bucket.buffer().scalar_type(), torch::kFloat);
  EXPECT_THROW(fp16_compress_wrapper({}), std::invalid_argument);
}

WORLD_TEST(CommHooks, NoopKeepsWhatIsThere, 2) {
  auto group = init_process_group();
  CommBytes sent;
  auto mine = gradients_of(world.rank, 20);
  auto bucket = make_bucket(mine.clone(), {{20}});
  EXPECT_TRUE(run(noop_hook(), bucket).equal(mine));
  EXPECT_EQ(sent.operations(), 0);
}

// Quantization loses half a level at most, of each rank's own range.
WORLD_TEST(CommHooks, QuantizationLosesHalfALevel, 1, 2, 3) {
  auto world_group = init_process_group();
  for (const auto& group : both_ways()) {
    constexpr int64_t kCount = 1'001;
    // The channels have very different sizes, and the last one is not full.
    auto scaled = [&](int rank) {
      auto all = gradients_of(rank, kCount);
      all.narrow(0, 512, kCount - 512).mul_(1'000);
      return all;
    };
    auto mean = torch::zeros({kCount});
    double range = 0;        // of all elements
    double first_range = 0;  // of the first channel
    for (int rank = 0; rank < world.size; ++rank) {
      auto all = scaled(rank);
      auto first = all.narrow(0, 0, 512);
      mean += all / world.size;
      range += (all.max() - all.min()).item<double>() / world.size;
      first_range += (first.max() - first.min()).item<double>() / world.size;
    }
    auto expect = [&](const CommHook& hook, double of_first, int64_t scales) {
      CommBytes sent;
      auto bucket = make_bucket(scaled(world.rank), {{kCount}});
      auto result = run(hook, bucket);
      auto wrong = (result - mean).abs();
      EXPECT_LE(wrong.max().item<double>(), range / 255 * 0.51);
      auto first = wrong.narrow(0, 0, 512).max().item<double>();
      EXPECT_LE(first, of_first / 255 * 0.51);
      EXPECT_GT(first, 0);
      EXPECT_EQ(sent.bytes(), kCount + 8 * scales);
      EXPECT_EQ(sent.operations(), 1);
    };
    expect(quantization_pertensor_hook(group), range, 1);
    expect(quantization_perchannel_hook(group), first_range, 2);
    expect(quantization_perchannel_hook(group, 128), first_range, 8);
  }
}

WORLD_TEST(CommHooks, QuantizationPassesNotANumberOn, 2) {
  auto group = init_process_group();
  auto flat = torch::ones({20});
  if (world.rank == 1) flat[3] = NAN;
  auto bucket = make_bucket(flat, {{20}});
  EXPECT_TRUE(
      run(quantization_pertensor_hook(), bucket).isnan().all().item<bool>());
  EXPECT_THAT(
      [] { quantization_perchannel_hook({}, 0); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("bucket_size is 0")));
}

std::shared_ptr<PowerSGDState> power_sgd(PowerSGDOptions options) {
  options.start_power_sgd_iter = 2;
  return std::make_shared<PowerSGDState>(options);
}

// Shapes in two buckets: [12, 8] twice, one that is too small, a vector, a
// scalar.
const Shapes kShapes = {{12, 8}, {12}, {12, 2, 4}, {2, 2}, {}};
constexpr int64_t kCount = 96 + 12 + 96 + 4 + 1;

WORLD_TEST(PowerSgd, FirstStepsAverageWithoutCompression, 2) {
  auto group = init_process_group();
  auto state = power_sgd({});
  auto hook = power_sgd_hook(state);
  for (int step = 0; step < 2; ++step) {
    EXPECT_EQ(state->iter, step);
    for (bool last : {false, true}) {
      auto bucket = make_bucket(gradients_of(world.rank, kCount, step), kShapes,
                                last, last);
      EXPECT_LE(worst(run(hook, bucket), mean_of(world.size, kCount, step)),
                1e-6);
    }
  }
  EXPECT_EQ(state->compression_stats().numel_before_compression, 0);
}

WORLD_TEST(PowerSgd, SendsItsFormulaAndAveragesTheRest, 2, 3) {
  auto world_group = init_process_group();
  for (const auto& group : both_ways()) {
    for (bool batched : {false, true}) {
      auto state = power_sgd({.process_group = group,
                              .matrix_approximation_rank = 2,
                              .batch_tensors_with_same_shape = batched});
      state->iter = 2;
      auto bucket = make_bucket(gradients_of(world.rank, kCount), kShapes);
      CommBytes sent;
      auto result = run(power_sgd_hook(state), bucket);
      constexpr int64_t kSent = 2 * (12 + 8) * 2 + 12 + 4 + 1;
      EXPECT_EQ(sent.bytes(), kSent * 4);
      EXPECT_EQ(sent.operations(), 2);
      auto stats = state->compression_stats();
      EXPECT_EQ(stats.numel_before_compression, kCount);
      EXPECT_EQ(stats.numel_after_compression, kSent);
      EXPECT_DOUBLE_EQ(stats.compress_rate, double(kCount) / kSent);
      auto mean = mean_of(world.size, kCount);
      auto part = [](const at::Tensor& flat, int64_t from, int64_t count) {
        return flat.narrow(0, from, count);
      };
      EXPECT_LE(worst(part(result, 96, 12), part(mean, 96, 12)), 1e-6);
      EXPECT_LE(worst(part(result, 204, 5), part(mean, 204, 5)), 1e-6);
      for (int64_t from : {0, 108}) {
        auto got = part(result, from, 96).view({12, 8});
        EXPECT_EQ(torch::linalg_matrix_rank(got, 1e-4).item<int64_t>(), 2);
        // The result is nearer to the mean than zero is.
        auto want = part(mean, from, 96).view({12, 8});
        EXPECT_LT((got - want).norm().item<double>(),
                  want.norm().item<double>());
      }
    }
  }
}

WORLD_TEST(PowerSgd, MatricesOfItsRankComeThroughExactly, 2) {
  auto world_group = init_process_group();
  for (const auto& group : both_ways()) {
    for (int64_t rank : {1, 2, 3}) {
      auto right = gradients_of(7, rank * 25).view({rank, 25});
      auto of_rank = [&](int number) {
        auto left = gradients_of(number, 25 * rank, 3).view({25, rank});
        return left.mm(right).flatten();
      };
      auto mean = (of_rank(0) + of_rank(1)) / 2;
      for (auto make : {power_sgd_hook, batched_power_sgd_hook}) {
        auto state = power_sgd(
            {.process_group = group, .matrix_approximation_rank = rank});
        state->iter = 2;
        auto bucket = make_bucket(of_rank(world.rank), {{25, 25}});
        EXPECT_LE(worst(run(make(state), bucket), mean), 1e-4) << rank;
      }
    }
  }
}

// Error feedback applies later what compression leaves out, so the sum of the
// results follows the sum of the gradients.
WORLD_TEST(PowerSgd, ErrorFeedbackMakesUpForWhatIsLeftOut, 2) {
  auto group = init_process_group();
  auto left_over = [&](bool feedback,
                       CommHook (*make)(std::shared_ptr<PowerSGDState>)) {
    auto state = power_sgd({.use_error_feedback = feedback});
    state->iter = 2;
    auto hook = make(state);
    auto missing = torch::zeros({144});
    for (int step = 0; step < 60; ++step) {
      auto bucket = make_bucket(gradients_of(world.rank, 144), {{12, 12}});
      missing += mean_of(world.size, 144) - run(hook, bucket);
    }
    return missing.norm().item<double>();
  };
  for (auto make : {power_sgd_hook, batched_power_sgd_hook}) {
    EXPECT_LT(left_over(true, make), 0.2 * left_over(false, make));
  }
}

WORLD_TEST(PowerSgd, WarmStartKeepsQs, 2) {
  auto group = init_process_group();
  for (bool warm : {true, false}) {
    auto state = power_sgd({.use_error_feedback = false, .warm_start = warm});
    state->iter = 2;
    auto hook = power_sgd_hook(state);
    auto mean = mean_of(world.size, 144).view({12, 12});
    auto best = std::get<1>(torch::linalg_svd(mean))[0].item<double>();
    double norm = 0;
    for (int step = 0; step < 40; ++step) {
      auto bucket = make_bucket(gradients_of(world.rank, 144), {{12, 12}});
      norm = run(hook, bucket).norm().item<double>();
    }
    // With a warm start the steps are one power iteration on the same matrix.
    if (warm) {
      EXPECT_NEAR(norm, best, 1e-2);
    } else {
      EXPECT_LT(norm, best - 1e-2);
    }
    EXPECT_EQ(state->q_memory_dict.size(), warm ? 1u : 0u);
  }
}

WORLD_TEST(PowerSgd, AVanishedGradientStaysZero, 2) {
  auto group = init_process_group();
  for (int64_t rank : {1, 2, 3}) {
    auto state = power_sgd({.matrix_approximation_rank = rank});
    state->iter = 2;
    auto bucket = make_bucket(torch::zeros({144}), {{12, 12}});
    EXPECT_TRUE(run(power_sgd_hook(state), bucket).equal(torch::zeros({144})));
  }
}

WORLD_TEST(PowerSgd, UnderAHalfWrapperSendsHalf, 2) {
  auto group = init_process_group();
  at::Tensor results[2];
  for (bool half : {false, true}) {
    auto state = power_sgd({});
    state->iter = 2;
    state->q_memory_dict[0] = torch::ones({12});
    auto hook = power_sgd_hook(state);
    if (half) hook = fp16_compress_wrapper(hook);
    auto bucket = make_bucket(gradients_of(world.rank, 144), {{12, 12}});
    CommBytes sent;
    results[half] = run(hook, bucket);
    EXPECT_EQ(sent.bytes(), 24 * (half ? 2 : 4));
    EXPECT_EQ(state->error_dict.at(0).scalar_type(),
              half ? torch::kHalf : torch::kFloat);
  }
  EXPECT_EQ(results[1].scalar_type(), torch::kFloat);
  EXPECT_LE(worst(results[0], results[1]), 1e-2);
}

WORLD_TEST(PowerSgd, ItsStateGoesOnInAnother, 2) {
  auto group = init_process_group();
  auto steps = [&](const std::shared_ptr<PowerSGDState>& state, int from,
                   int to) {
    auto hook = power_sgd_hook(state);
    at::Tensor result;
    for (int step = from; step < to; ++step) {
      auto bucket =
          make_bucket(gradients_of(world.rank, kCount, step), kShapes);
      result = run(hook, bucket);
    }
    return result;
  };
  auto whole = steps(power_sgd({}), 0, 8);
  auto first = power_sgd({});
  steps(first, 0, 5);
  auto second = std::make_shared<PowerSGDState>(*first);
  EXPECT_TRUE(steps(second, 5, 8).equal(whole));
}

WORLD_TEST(PowerSgd, StatsAreLoggedAsOftenAsSaid, 1) {
  auto group = init_process_group();
  std::vector<int64_t> logged;
  auto state =
      power_sgd({.compression_stats_logging_frequency = 3,
                 .log_compression_stats = [&](const CompressionStats& stats) {
                   logged.push_back(stats.iter);
                   EXPECT_GT(stats.compress_rate, 1);
                 }});
  auto hook = power_sgd_hook(state);
  for (int step = 0; step < 9; ++step) {
    auto bucket = make_bucket(gradients_of(0, 144), {{12, 12}});
    run(hook, bucket);
  }
  EXPECT_THAT(logged, ::testing::ElementsAre(2, 5, 8));
}

// Regression: these hooks dropped the imaginary parts.
WORLD_TEST(CommHooks, ComplexGradientsAreAveragedOrRefused, 2) {
  auto group = init_process_group();
  const auto state = std::make_shared<PowerSGDState>();
  const std::vector<std::pair<const char*, CommHook>> compressing{
      {"fp16_compress_hook", fp16_compress_hook()},
      {"bf16_compress_hook", bf16_compress_hook()},
      {"fp16_compress_wrapper", fp16_compress_wrapper(allreduce_hook())},
      {"bf16_compress_wrapper", bf16_compress_wrapper(allreduce_hook())},
      {"quantization_pertensor_hook", quantization_pertensor_hook()},
      {"quantization_perchannel_hook", quantization_perchannel_hook()},
      {"batched_power_sgd_hook", batched_power_sgd_hook(state)},
      {"power_sgd_hook", power_sgd_hook(state)}};
  const auto complex = [&] {
    return make_bucket(torch::complex(gradients_of(world.rank, 50),
                                      gradients_of(world.rank, 50, 1)),
                       {{5, 10}});
  };
  for (const auto& [name, hook] : compressing) {
    EXPECT_THAT([&] { run(hook, complex()); },
                ThrowsMessage<std::invalid_argument>(
                    AllOf(::testing::StartsWith(std::string(name) + ":"),
                          HasSubstr("complex"))));
  }
  EXPECT_EQ(state->iter, 0);
  const auto average = run(allreduce_hook(), complex());
  EXPECT_LE(worst(torch::real(average), mean_of(2, 50)), 1e-6);
  EXPECT_LE(worst(torch::imag(average), mean_of(2, 50, 1)), 1e-6);
}

WORLD_TEST(PowerSgd, MistakesAreNamed, 1) {
  auto group = init_process_group();
  EXPECT_THAT(
      [] { PowerSGDState state({.start_power_sgd_iter = 1}); },
      ThrowsMessage<std::invalid_argument>(AllOf(
          HasSubstr("start_power_sgd_iter is 1"), HasSubstr("2 or more"))));
  PowerSGDState without({.start_power_sgd_iter = 0,
                         .use_error_feedback = false,
                         .warm_start = false});
  EXPECT_THAT([] { PowerSGDState state({.matrix_approximation_rank = 0}); },
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("matrix_approximation_rank is 0")));
  EXPECT_THROW(power_sgd_hook(nullptr), std::invalid_argument);
}

WORLD_TEST(PostLocalSgd, AveragesInTheSubgroupBehindTheFirstSteps, 4) {
  auto group = init_process_group();
  auto pair = new_subgroups(2);
  auto state = std::make_shared<PostLocalSGDState>(
      PostLocalSGDOptions{.subgroup = pair, .start_local_sgd_iter = 2});
  auto hook = post_local_sgd_hook(state);
  auto step = [&] {
    auto bucket = make_bucket(torch::full({3}, float(world.rank)), {{3}});
    return run(hook, bucket)[0].item<double>();
  };
  EXPECT_EQ(step(), 1.5);
  EXPECT_EQ(step(), 1.5);
  EXPECT_EQ(step(), world.rank < 2 ? 0.5 : 2.5);
  EXPECT_EQ(step(), world.rank < 2 ? 0.5 : 2.5);
}

WORLD_TEST(PostLocalSgd, ByDefaultAHostIsTheSubgroup, 2) {
  auto group = init_process_group();
  PostLocalSGDState state({.start_local_sgd_iter = 1});
  EXPECT_EQ(state.options.subgroup->size(), 2);
  EXPECT_THROW(PostLocalSGDState({.start_local_sgd_iter = -1}),
               std::invalid_argument);
}

// Regression: a rank whose last bucket failed was one step ahead of the ranks
// that had given up before, and changed to the subgroup before them.
WORLD_TEST(PostLocalSgd, AStepThatFailsIsNotCounted, 1) {
  auto group = init_process_group();
  auto state = std::make_shared<PostLocalSGDState>(PostLocalSGDOptions{
      .start_local_sgd_iter = 2, .post_local_gradient_allreduce = false});
  auto hook = post_local_sgd_hook(state);
  // Integers cannot be averaged in place.
  auto refused = make_bucket(torch::ones({3}, torch::kLong), {{3}});
  EXPECT_THROW(hook(refused), c10::Error);
  EXPECT_EQ(state->iter, 0);
  run(hook, make_bucket(torch::ones({3}), {{3}}, 0, /*is_last=*/false));
  EXPECT_EQ(state->iter, 0);
  run(hook, make_bucket(torch::ones({3}), {{3}}, 1));
  EXPECT_EQ(state->iter, 1);
}

WORLD_TEST(PostLocalSgd, MayStopAveragingGradients, 2) {
  auto group = init_process_group();
  auto hook = post_local_sgd_hook(std::make_shared<PostLocalSGDState>(
      PostLocalSGDOptions{.post_local_gradient_allreduce = false}));
  auto bucket = make_bucket(torch::full({3}, float(world.rank)), {{3}});
  CommBytes sent;
  EXPECT_EQ(run(hook, bucket)[0].item<double>(), world.rank);
  EXPECT_EQ(sent.bytes(), 0);
}

TEST(CommFutures, GiveOneTensorOrSayWhatElse) {
  auto value = torch::ones({2});
  EXPECT_TRUE(wait_for_tensor(completed_future(value)).is_same(value));
  auto complete = [](const c10::IValue& with) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
    future->markCompleted(with);
    return future;
  };
  EXPECT_TRUE(
      wait_for_tensor(complete(std::vector<at::Tensor>{value})).equal(value));
  EXPECT_THAT(
      [&] { wait_for_tensor(complete(std::vector<at::Tensor>{value, value})); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("a list of 2 tensors")));
  EXPECT_THAT([&] { wait_for_tensor(complete(3)); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("Int")));
  EXPECT_THROW(wait_for_tensor(nullptr), std::invalid_argument);
  auto failed = c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
  int successes = 0;
  const auto count = [&] { ++successes; };
  EXPECT_TRUE(
      wait_for_tensor(after_success(complete(value), count)).is_same(value));
  auto counted = after_success(failed, count);
  failed->setError(std::make_exception_ptr(std::runtime_error("a peer left")));
  EXPECT_THAT([&] { wait_for_tensor(counted); },
              ThrowsMessage<std::runtime_error>(HasSubstr("a peer left")));
  EXPECT_EQ(successes, 1);
  EXPECT_THAT([&] { wait_for_tensor(failed); },
              ThrowsMessage<std::runtime_error>(HasSubstr("a peer left")));
}

TEST(CommFutures, ABucketRefusesABufferOfAnotherShape) {
  auto bucket = make_bucket(torch::ones({6}), {{2, 3}});
  EXPECT_THAT([&] { bucket.set_buffer(torch::ones({5})); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("[6]")));
}

WORLD_TEST(CommBytes, CountsWhatThisRankHandsIn, 2, 3) {
  auto group = init_process_group("gloo");
  CommBytes sent;
  all_reduce(torch::ones({10}));
  EXPECT_EQ(sent.bytes(), 40);
  sent.reset();
  all_gather_into_tensor(torch::empty({10 * world.size}), torch::ones({10}));
  EXPECT_EQ(sent.bytes(), 40);
  sent.reset();
  reduce_scatter_tensor(torch::empty({10}), torch::ones({10 * world.size}));
  EXPECT_EQ(sent.bytes(), 40 * world.size);
  EXPECT_EQ(sent.operations(), 1);
}

}  // namespace
}  // namespace lockstep::internal
