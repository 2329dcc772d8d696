// Random numbers of tensor parallelism: equal where activations are replicated,
// different where they are divided.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/init.h"
#include "lockstep/parallel/tensor/parallel_self_attention.h"
#include "lockstep/parallel/tensor/tensor_parallel.h"
#include "tests/harness/message_of.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/tensor/whole_tensors.h"

namespace lockstep::internal {
namespace {

at::Tensor mask() { return at::dropout(torch::ones({64}), 0.5, true); }

at::Tensor generator_state() {
  return at::detail::getDefaultCPUGenerator().get_state();
}
void restore(const at::Tensor& state) {
  auto generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(state);
}

// Returns the tensors of all ranks, [ranks, ...].
at::Tensor of_all_ranks(const at::Tensor& tensor) {
  auto shape = tensor.sizes().vec();
  shape.insert(shape.begin(), get_world_size());
  auto all = torch::empty(shape, tensor.options());
  all_gather_into_tensor(all, tensor);
  return all;
}

bool equal_on_all_ranks(const at::Tensor& tensor) {
  auto all = of_all_ranks(tensor);
  return torch::equal(all, all[0].expand_as(all));
}

WORLD_TEST(TensorParallelRandom, MasksDifferOnlyInside, 1, 2, 3) {
  auto group = init_process_group();
  torch::manual_seed(5);
  torch::randn({3});  // leaves half a pair of normal numbers
  EXPECT_TRUE(equal_on_all_ranks(mask()));
  at::Tensor first, second;
  {
    TensorParallelRandom random;
    first = mask();
    TensorParallelRandom nested;
    second = mask();
  }
  EXPECT_TRUE(equal_on_all_ranks(mask()));
  EXPECT_TRUE(equal_on_all_ranks(generator_state()));
  EXPECT_FALSE(torch::equal(first, second));
  for (const auto& inside : {first, second}) {
    auto all = of_all_ranks(inside);
    for (int a = 0; a < world.size; ++a) {
      for (int b = 0; b < a; ++b) EXPECT_FALSE(torch::equal(all[a], all[b]));
    }
  }
  {
    TensorParallelRandom random;
    EXPECT_FALSE(torch::equal(mask(), first));  // another draw
  }
}

// As activation checkpointing and snapshots do it.
WORLD_TEST(TensorParallelRandom, RestoredStatesRepeatTheMasks, 1, 2) {
  auto group = init_process_group();
  torch::manual_seed(5);
  auto before = generator_state();
  auto draw = [] {
    auto outside = mask();
    TensorParallelRandom random;
    return torch::stack({outside, mask(), mask()});
  };
  auto masks = draw();
  auto after = generator_state();
  restore(before);
  EXPECT_TRUE(torch::equal(draw(), masks));
  EXPECT_TRUE(torch::equal(generator_state(), after));
}

WORLD_TEST(TensorParallelRandom, AGroupOfOneDrawsAsOneProcess, 1) {
  auto group = init_process_group();
  torch::manual_seed(5);
  auto want = mask();
  torch::manual_seed(5);
  TensorParallelRandom random;
  EXPECT_TRUE(torch::equal(mask(), want));
}

WORLD_TEST(TensorParallelRandom, HeadsHaveMasksOfTheirOwn, 2) {
  auto group = init_process_group();
  torch::manual_seed(5);
  nn::ParallelSelfAttention attention(8, 2, {.bias = false, .dropout = 0.5});
  {
    // All ranks' heads are alike.
    torch::NoGradGuard no_grad;
    for (auto& parameter : attention->parameters()) broadcast(parameter, 0);
  }
  auto x = torch::randn({2, 6, 8});
  auto state = generator_state();
  auto have = attention->forward(x);
  EXPECT_TRUE(equal_on_all_ranks(have));
  EXPECT_TRUE(equal_on_all_ranks(generator_state()));
  restore(state);
  EXPECT_TRUE(torch::equal(attention->forward(x), have));

  // With the same mask on all ranks, the terms of the sum were equal.
  restore(state);
  TensorParallelRandom random;
  auto head = [&](const at::Tensor& weight) {
    return x.matmul(weight.t()).unsqueeze(1);
  };
  auto term = at::scaled_dot_product_attention(
                  head(attention->query->weight), head(attention->key->weight),
                  head(attention->value->weight), {}, 0.5)
                  .squeeze(1)
                  .matmul(attention->projection->weight.t());
  auto sum = term.detach().clone();
  all_reduce(sum);
  testing::expect_close(have, sum, 1e-6, "sum of the ranks' own terms");
  EXPECT_FALSE(torch::allclose(have, 2 * term));

  attention->eval();
  EXPECT_TRUE(torch::equal(attention->forward(x), attention->forward(x)));
}

WORLD_TEST(VerifyReplicated, NamesRankAndParameter, 1, 2, 3) {
  auto group = init_process_group();
  torch::manual_seed(5);
  nn::ParallelSelfAttention attention(12, 6);
  EXPECT_NO_THROW(verify_replicated(*attention));
  if (world.size == 1) return;
  const int last = world.size - 1;
  {
    torch::NoGradGuard no_grad;
    if (world.rank == last) attention->projection->bias[3] += 1;
  }
  auto message = testing::message_of([&] { verify_replicated(*attention); });
  EXPECT_EQ(message,
            c10::str("verify_replicated: 'projection.bias' of rank ", last,
                     " differs from that of rank 0, but the ranks of a tensor "
                     "group must have the same; give them the same "
                     "torch::manual_seed() before the model, and the same "
                     "snapshot"));
  broadcast(attention->projection->bias.detach(), 0);
  EXPECT_NO_THROW(verify_replicated(*attention));
  if (world.rank == 0) torch::rand({1});
  message = testing::message_of([&] { verify_replicated(*attention); });
  EXPECT_NE(message.find("the state of the default generator of rank 1"),
            std::string::npos)
      << message;
}

}  // namespace
}  // namespace lockstep::internal
