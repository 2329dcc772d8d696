#include "lockstep/comm/collectives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "lockstep/comm/init.h"
#include "tests/harness/process_world.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using testing::World;

// What rank `rank` puts in: different on every rank and element, small enough
// to be exact in every dtype.
at::Tensor input(int rank, c10::IntArrayRef shape, at::ScalarType dtype) {
  int64_t count = c10::multiply_integers(shape);
  return (at::arange(count, at::kLong) * (rank + 1) % 5 + 1)
      .reshape(shape)
      .to(dtype);
}

// The scalar reference: rank by rank, in order.
at::Tensor reference(int world_size, c10::IntArrayRef shape,
                     at::ScalarType dtype,
                     const std::function<double(double, double)>& op) {
  auto result = input(0, shape, at::kDouble);
  for (int rank = 1; rank < world_size; ++rank) {
    auto next = input(rank, shape, at::kDouble);
    auto* a = result.data_ptr<double>();
    const auto* b = next.const_data_ptr<double>();
    for (int64_t i = 0; i < result.numel(); ++i) a[i] = op(a[i], b[i]);
  }
  return result.to(dtype);
}

const std::vector<std::vector<int64_t>> kShapes{{}, {1}, {7}, {3, 5}, {65'537}};

WORLD_TEST(Collectives, AllReduceMatchesScalarReference, 1, 2, 3, 5, 8) {
  auto group = init_process_group("gloo");
  struct Case {
    ReduceOp::RedOpType op;
    std::function<double(double, double)> scalar;
  };
  const std::vector<Case> cases{
      {ReduceOp::SUM, std::plus<>()},
      {ReduceOp::PRODUCT, std::multiplies<>()},
      {ReduceOp::MIN, [](double a, double b) { return std::min(a, b); }},
      {ReduceOp::MAX, [](double a, double b) { return std::max(a, b); }}};
  for (const auto& shape : kShapes) {
    for (auto dtype : {at::kFloat, at::kDouble, at::kInt, at::kLong}) {
      for (const auto& c : cases) {
        auto tensor = input(world.rank, shape, dtype);
        EXPECT_EQ(all_reduce(tensor, {.op = c.op}), nullptr);
        EXPECT_TRUE(tensor.equal(reference(world.size, shape, dtype, c.scalar)))
            << dtype << c10::IntArrayRef(shape) << " op " << int{c.op};
      }
    }
  }
}

WORLD_TEST(Collectives, AllReduceAverages, 1, 2, 3) {
  auto group = init_process_group("gloo");
  auto tensor = at::full({5}, world.rank + 1.0, at::kDouble);
  all_reduce(tensor, {.op = ReduceOp::AVG});
  EXPECT_TRUE(at::allclose(
      tensor, at::full({5}, (world.size + 1) / 2.0, at::kDouble), 1e-15));
  EXPECT_THAT(
      [] { all_reduce(at::ones({2}, at::kInt), {.op = ReduceOp::AVG}); },
      ThrowsMessage<std::invalid_argument>(HasSubstr("AVG")));
}

WORLD_TEST(Collectives, ReduceReachesOnlyDst, 1, 2, 3, 5) {
  auto group = init_process_group("gloo");
  for (int dst = 0; dst < world.size; ++dst) {
    auto tensor = input(world.rank, {3, 5}, at::kFloat);
    reduce(tensor, dst);
    if (world.rank == dst) {
      EXPECT_TRUE(tensor.equal(
          reference(world.size, {3, 5}, at::kFloat, std::plus<>())));
    }
  }
}

WORLD_TEST(Collectives, BroadcastGivesThatOfSrc, 1, 2, 3, 5) {
  auto group = init_process_group("gloo");
  for (const auto& shape : kShapes) {
    for (int src = 0; src < world.size; ++src) {
      auto tensor = input(world.rank, shape, at::kFloat);
      broadcast(tensor, src);
      EXPECT_TRUE(tensor.equal(input(src, shape, at::kFloat)));
    }
  }
}

WORLD_TEST(Collectives, AllGatherIsInRankOrder, 1, 2, 3, 5) {
  auto group = init_process_group("gloo");
  for (const auto& shape : kShapes) {
    std::vector<at::Tensor> list;
    for (int i = 0; i < world.size; ++i) list.push_back(at::empty(shape));
    all_gather(list, input(world.rank, shape, at::kFloat));
    for (int i = 0; i < world.size; ++i) {
      EXPECT_TRUE(list[i].equal(input(i, shape, at::kFloat)));
    }
  }
}

WORLD_TEST(Collectives, NonContiguousTensorsAreFine, 2, 3) {
  auto group = init_process_group("gloo");
  auto base = input(world.rank, {4, 6}, at::kFloat);
  auto expected = reference(world.size, {4, 6}, at::kFloat, std::plus<>()).t();
  all_reduce(base.t());
  EXPECT_TRUE(base.t().equal(expected));
  auto columns = at::zeros({4, world.size});
  std::vector<at::Tensor> list;
  for (int i = 0; i < world.size; ++i) list.push_back(columns.select(1, i));
  all_gather(list, at::full({4}, world.rank + 1.0f));
  for (int i = 0; i < world.size; ++i) {
    EXPECT_TRUE(columns.select(1, i).equal(at::full({4}, i + 1.0f)));
  }
}

WORLD_TEST(Collectives, ALeafThatRequiresGradIsReducedInPlace, 2) {
  auto group = init_process_group("gloo");
  auto leaf = torch::ones({3}, torch::requires_grad());
  all_reduce(leaf);
  EXPECT_TRUE(leaf.detach().equal(at::full({3}, 2.0f)));
  EXPECT_TRUE(leaf.is_leaf());
}

WORLD_TEST(Collectives, AsynchronousOnesEndInAnyOrderOfWaits, 1, 2, 3) {
  auto group = init_process_group("gloo");
  auto a = at::full({1000}, world.rank + 1.0f);
  auto b = at::full({7}, world.rank + 1.0f);
  auto first = all_reduce(a, {.async_op = true});
  auto second = all_reduce(b, {.op = ReduceOp::MAX, .async_op = true});
  second->wait();
  first->wait();
  float sum = world.size * (world.size + 1) / 2.0f;
  EXPECT_TRUE(a.equal(at::full({1000}, sum)));
  EXPECT_TRUE(b.equal(at::full({7}, float(world.size))));
  EXPECT_THAT([] { all_reduce(at::ones({2, 3}).t(), {.async_op = true}); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("contiguous")));
}

WORLD_TEST(Collectives, ATimeoutNamesOperationGroupRankAndTimes, 2) {
  auto group = init_process_group("gloo");
  barrier();
  if (world.rank == 0) {
    try {
      all_reduce(at::ones({4}), {.timeout = std::chrono::milliseconds(200)});
      FAIL() << "an all_reduce without a peer returned";
    } catch (const c10::DistBackendError& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  ::testing::AllOf(
                      HasSubstr("all_reduce"), HasSubstr("default_pg"),
                      HasSubstr("rank 0 of 2"), HasSubstr("allowed 200 ms")));
    }
  }
}

WORLD_TEST(Collectives, MisuseIsSeenBeforeAnythingIsSent, 2) {
  auto group = init_process_group("gloo");
  EXPECT_THAT([] { all_reduce(at::Tensor()); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("undefined")));
  EXPECT_THAT([] { reduce(at::ones({1}), 2); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("rank 2")));
  std::vector<at::Tensor> list{at::ones({2})};
  auto gather = [&] { all_gather(list, at::ones({2})); };
  EXPECT_THAT(gather,
              ThrowsMessage<std::invalid_argument>(HasSubstr("one a rank")));
  list.push_back(at::ones({3}));
  EXPECT_THAT(gather,
              ThrowsMessage<std::invalid_argument>(HasSubstr("same shape")));
  EXPECT_THAT([] { all_reduce(at::ones({1}, at::kMeta)); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("cpu:gloo")));
  auto tensor = at::ones({1});
  all_reduce(tensor);  // the group is still in step
  EXPECT_EQ(tensor.item<float>(), 2.0f);
}

}  // namespace
}  // namespace lockstep
