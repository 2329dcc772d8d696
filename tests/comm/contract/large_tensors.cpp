// Tensors larger than any size at which a backend cuts its work into parts (the
// largest is 4 MiB). Every element is compared.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lockstep/comm/collectives.h"
#include "tests/comm/contract/contract.h"

namespace lockstep::internal::testing {
namespace {

// Two whole parts of 4 MiB, and one that is neither whole nor aligned.
constexpr int64_t kBytes = 9 * (1 << 20) + 40;

constexpr int64_t kCount = kBytes / sizeof(float);

// Returns small integers in a different order for each `seed`; their sums are
// exact. The period is odd, so no two parts are alike.
at::Tensor content(int64_t seed) {
  return at::arange(kCount, at::kFloat).mul_(seed + 3).remainder_(31);
}

// Reports the first difference, because its place tells what failed: a part, a
// lane, or a rank's slice.
void expect_equal(const at::Tensor& have, const at::Tensor& want,
                  const char* operation) {
  const auto host = have.to(at::kCPU);
  if (host.equal(want)) return;
  const auto wrong = host.ne(want).nonzero().flatten();
  const auto first = wrong[0].item<int64_t>();
  ADD_FAILURE() << operation << ": " << wrong.numel() << " of " << want.numel()
                << " elements are wrong, the first at " << first << ": "
                << host[first].item<double>() << ", not "
                << want[first].item<double>();
}

CONTRACT_TEST(LargeTensors, EveryElementIsReduced, 2, 5) {
  auto group = world.init();
  auto sum = content(0);
  auto maximum = content(0);
  for (int rank = 1; rank < world.size; ++rank) {
    sum.add_(content(rank));
    at::maximum_out(maximum, maximum, content(rank));
  }
  const auto own = content(world.rank).to(world.device);
  auto tensor = own.clone();
  all_reduce(tensor);
  expect_equal(tensor, sum, "all_reduce SUM");
  tensor.copy_(own);
  all_reduce(tensor, {.op = ReduceOp::MAX});
  expect_equal(tensor, maximum, "all_reduce MAX");
  tensor.copy_(own);
  const int root = world.size - 1;
  reduce(tensor, root);
  if (world.rank == root) expect_equal(tensor, sum, "reduce");
}

CONTRACT_TEST(LargeTensors, EveryElementIsMoved, 2, 5) {
  auto group = world.init();
  const int root = world.size - 1;
  const auto own = content(world.rank).to(world.device);
  auto tensor = own.clone();
  broadcast(tensor, root);
  expect_equal(tensor, content(root), "broadcast");

  std::vector<at::Tensor> all;
  for (int i = 0; i < world.size; ++i) all.push_back(at::empty_like(own));
  all_gather(all, own);
  for (int i = 0; i < world.size; ++i) {
    expect_equal(all[i], content(i), "all_gather");
  }

  // The output of each rank has the whole size.
  std::vector<at::Tensor> inputs;
  auto sum = at::zeros({kCount});
  for (int i = 0; i < world.size; ++i) {
    inputs.push_back(content(world.rank + i).to(world.device));
    sum.add_(content(i + world.rank));
  }
  auto output = at::empty_like(own);
  reduce_scatter(output, inputs);
  expect_equal(output, sum, "reduce_scatter");
}

}  // namespace
}  // namespace lockstep::internal::testing
