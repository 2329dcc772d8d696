// The functions of tensor_collectives.h, against one process that has all
// ranks' tensors.

#include "lockstep/parallel/tensor/tensor_collectives.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/group_inside.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"
#include "tests/parallel/tensor/whole_tensors.h"

namespace lockstep::internal {
namespace {

using testing::expect_close;

constexpr double kBound = 1e-13;

// Sums of all ranks' tensors, which autograd does not see.
at::Tensor summed(const at::Tensor& tensor) {
  auto sum = tensor.detach().clone();
  all_reduce(sum);
  return sum;
}

// Returns another tensor on each rank, and the same on one process that asks
// for the same rank.
at::Tensor drawn(int rank, at::IntArrayRef shape) {
  torch::manual_seed(100 + rank);
  return torch::randn(shape, at::kDouble);
}

WORLD_TEST(TensorCollectives, CopyAddsUpGradients, 1, 2, 3) {
  testing::on_both_backends([&] {
    auto x = drawn(50, {4, 3}).requires_grad_();
    auto factor = drawn(world.rank, {4, 3});
    auto copy = copy_to_tensor_group(x);
    EXPECT_TRUE(torch::equal(copy, x));
    (copy * factor).sum().backward();
    expect_close(x.grad(), summed(factor), kBound, "gradient");
    // Again, and accumulated.
    (copy_to_tensor_group(x) * factor).sum().backward();
    expect_close(x.grad(), summed(factor) * 2, kBound, "accumulated gradient");
  });
}

WORLD_TEST(TensorCollectives, CopyLeavesASharedGradientAlone, 2) {
  auto group = init_process_group();
  auto a = torch::ones({5}, at::kDouble).requires_grad_();
  auto b = torch::ones({5}, at::kDouble).requires_grad_();
  // Autograd gives both terms of the sum one tensor.
  (copy_to_tensor_group(a) + b).sum().backward();
  EXPECT_EQ(a.grad()[0].item<double>(), 2);
  EXPECT_EQ(b.grad()[0].item<double>(), 1);
}

WORLD_TEST(TensorCollectives, ReduceAddsUpAndCopiesGradients, 1, 2, 3) {
  testing::on_both_backends([&] {
    auto x = drawn(world.rank, {4, 3}).requires_grad_();
    auto factor = drawn(50, {4, 3});
    auto sum = reduce_from_tensor_group(x);
    expect_close(sum, summed(x), kBound, "sum");
    expect_close(x, drawn(world.rank, {4, 3}), 0, "input");
    (sum * factor).sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), factor));
  });
}

WORLD_TEST(TensorCollectives, ScatterAndGatherAreEachOthersBackward, 1, 2, 3,
           4) {
  testing::on_both_backends([&] {
    for (int64_t dim : {0, 1, -1}) {
      // 5 cannot be divided equally by 2, 3 or 4; of 2, a rank may have none.
      for (int64_t size : {12, 5, 2}) {
        std::vector<int64_t> shape{3, 4, 2};
        shape[static_cast<size_t>(dim < 0 ? 2 : dim)] = size;
        SCOPED_TRACE(c10::str("dim ", dim, ", size ", size));
        auto x = drawn(50, shape).requires_grad_();
        auto part = scatter_to_tensor_group(x, dim);
        auto want = x.chunk(world.size, dim);
        const auto rank = static_cast<size_t>(world.rank);
        if (rank < want.size()) {
          EXPECT_TRUE(torch::equal(part, want[rank]));
        } else {
          EXPECT_EQ(part.numel(), 0);
        }
        // A gradient that is replicated after the gather.
        auto factor = drawn(60, shape);
        auto whole = gather_from_tensor_group(part.sin(), dim, {}, size);
        expect_close(whole, x.sin(), kBound, "gathered");
        (whole * factor).sum().backward();
        expect_close(x.grad(), x.cos() * factor, kBound, "gradient");
        // The result may be modified in place.
        EXPECT_NO_THROW(whole.mul_(2));
      }
    }
  });
}

WORLD_TEST(TensorCollectives, SequencesAreGatheredAndReduced, 1, 2, 3) {
  testing::on_both_backends([&] {
    for (int64_t dim : {0, 1}) {
      SCOPED_TRACE(dim);
      std::vector<int64_t> shape{6, 12, 2};
      auto parts = drawn(50, shape).chunk(world.size, dim);
      auto part = parts[static_cast<size_t>(world.rank)]
                      .detach()
                      .clone()
                      .requires_grad_();
      auto whole = all_gather_sequence(part, dim);
      EXPECT_TRUE(torch::equal(whole, drawn(50, shape)));
      auto factor = drawn(world.rank, shape);
      (whole * factor).sum().backward();
      const auto rank = static_cast<size_t>(world.rank);
      expect_close(part.grad(), summed(factor).chunk(world.size, dim)[rank],
                   kBound, "gradient of a gather");

      auto term = drawn(world.rank, shape).requires_grad_();
      auto reduced = reduce_scatter_sequence(term, dim);
      expect_close(reduced, summed(term).chunk(world.size, dim)[rank], kBound,
                   "reduced part");
      auto all_factors = drawn(70, shape);
      (reduced * all_factors.chunk(world.size, dim)[rank]).sum().backward();
      expect_close(term.grad(), all_factors, kBound, "gradient of a reduction");
    }
  });
}

// d/dw of |d loss / dx|^2, through column-parallel and row-parallel products,
// compared with one process.
WORLD_TEST(TensorCollectives, SecondDerivativesAreRight, 1, 2, 3) {
  auto group = init_process_group();
  constexpr int64_t kSize = 6;
  auto penalty = [](const at::Tensor& x, const at::Tensor& y) {
    auto gradient = torch::autograd::grad({y.tanh().sum()}, {x}, {},
                                          /*retain_graph=*/true,
                                          /*create_graph=*/true)[0];
    return gradient.square().sum();
  };
  auto first = drawn(1, {kSize, kSize}).requires_grad_();
  auto second = drawn(2, {kSize, kSize}).requires_grad_();
  auto x = drawn(3, {kSize, kSize}).requires_grad_();
  penalty(x, x.matmul(first).tanh().matmul(second)).backward();

  const auto rank = static_cast<size_t>(world.rank);
  auto own = [&](const at::Tensor& whole, int64_t dim) {
    return whole.detach().chunk(world.size, dim)[rank].clone().requires_grad_();
  };
  for (bool sequence : {false, true}) {
    SCOPED_TRACE(sequence);
    auto first_part = own(first, 1);
    auto second_part = own(second, 0);
    auto z = sequence ? own(x, 0) : x.detach().clone().requires_grad_();
    auto in = sequence ? all_gather_sequence(z, 0) : copy_to_tensor_group(z);
    auto term = in.matmul(first_part).tanh().matmul(second_part);
    auto y = sequence ? reduce_scatter_sequence(term, 0)
                      : reduce_from_tensor_group(term);
    auto loss = penalty(z, y);
    // Each rank has the penalty of its part of the sequence.
    if (sequence) loss = reduce_from_tensor_group(loss);
    loss.backward();
    expect_close(first_part.grad(), first.grad().chunk(world.size, 1)[rank],
                 1e-12, "gradient of the first weight");
    expect_close(second_part.grad(), second.grad().chunk(world.size, 0)[rank],
                 1e-12, "gradient of the second weight");
  }
}

WORLD_TEST(TensorCollectives, MistakesAreNamed, 2) {
  auto group = init_process_group();
  auto x = torch::zeros({4, 7});
  auto message = testing::message_of([&] { reduce_scatter_sequence(x, 1); });
  EXPECT_EQ(message,
            "reduce_scatter_sequence: dimension 1 has 7 indices, of which 2 "
            "ranks cannot have equal parts; pad the sequence to a multiple of "
            "2");
  message =
      testing::message_of([&] { gather_from_tensor_group(x, -1, {}, 8); });
  EXPECT_EQ(message,
            "gather_from_tensor_group: dimension 1 of the input has 7 indices, "
            "but of 8 this rank has 4; give the part that "
            "scatter_to_tensor_group() makes");
}

WORLD_TEST(TensorCollectives, AGroupOfOneCommunicatesNothing, 1, 2) {
  auto group = init_process_group();
  ProcessGroupPtr own;
  for (int rank = 0; rank < world.size; ++rank) {
    auto made = new_group({rank});
    if (made) own = made;
  }
  const auto before = inside(own).next_sequence_number();
  auto x = drawn(1, {4, 6});
  for (const auto& result :
       {copy_to_tensor_group(x, own), reduce_from_tensor_group(x, own),
        gather_from_tensor_group(x, 1, own), scatter_to_tensor_group(x, 1, own),
        all_gather_sequence(x, 1, own), reduce_scatter_sequence(x, 1, own)}) {
    EXPECT_TRUE(result.is_same(x));
  }
  EXPECT_EQ(inside(own).next_sequence_number(), before + 1);
}

}  // namespace
}  // namespace lockstep::internal
