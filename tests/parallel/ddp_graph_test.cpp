// Backward passes that leave out parameters, or are nested, on shared memory
// and on Gloo.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <tuple>

#include "lockstep/parallel/ddp/distributed_data_parallel.h"
#include "tests/harness/process_world.h"
#include "tests/parallel/both_backends.h"

namespace lockstep::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::on_both_backends;
using ::testing::ThrowsMessage;
using testing::World;

// Two branches; a forward takes one of them, or both.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    left = register_module("left", torch::nn::Linear(2, 1));
    right = register_module("right", torch::nn::Linear(2, 1));
  }
  torch::Tensor forward(const torch::Tensor& x, const std::string& which) {
    torch::Tensor sum = torch::zeros({x.size(0), 1});
    if (which != "right") sum = sum + left(x);
    if (which != "left") sum = sum + right(x);
    return sum;
  }
  torch::nn::Linear left{nullptr}, right{nullptr};
};
TORCH_MODULE(Branches);

// Returns a row of x for each rank, so the bias' gradient is this rank's share.
torch::Tensor batch_rows(int count = 1) { return torch::ones({count, 2}); }

WORLD_TEST(DdpUnused, WhatOneRankLeavesOutIsAveragedOverAll, 2, 3) {
  on_both_backends([&] {
    Branches net;
    DistributedDataParallel<Branches> model(net,
                                            {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const bool both = world.rank == step % world.size;
      model(batch_rows(), both ? "both" : "left").sum().backward();
      EXPECT_FLOAT_EQ(net->left->bias.grad().item<float>(), 1) << step;
      ASSERT_TRUE(net->right->bias.grad().defined()) << step;
      EXPECT_FLOAT_EQ(net->right->bias.grad().item<float>(), 1.0F / world.size)
          << step;
    }
  });
}

WORLD_TEST(DdpUnused, WhatNoRankUsesKeepsItsGradient, 2) {
  on_both_backends([&] {
    Branches net;
    DistributedDataParallel<Branches> model(net,
                                            {.find_unused_parameters = true});
    model(batch_rows(), "left").sum().backward();
    EXPECT_FALSE(net->right->bias.grad().defined());
    net->zero_grad();
    model(batch_rows(), "both").sum().backward();
    EXPECT_FLOAT_EQ(net->right->bias.grad().item<float>(), 1);
    net->zero_grad();
    model(batch_rows(), "right").sum().backward();
    EXPECT_FALSE(net->left->bias.grad().defined());
    EXPECT_FLOAT_EQ(net->right->bias.grad().item<float>(), 1);
  });
}

// Regression: a plain backward on one rank added to the gradient, and the
// average removed that.
WORLD_TEST(DdpUnused, WhatAPlainBackwardAddedStaysWhereNoRankUsesIt, 2, 3) {
  on_both_backends([&] {
    Branches net;
    DistributedDataParallel<Branches> model(net,
                                            {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad(/*set_to_none=*/step == 2);
      if (world.rank == 0) net->forward(batch_rows(), "right").sum().backward();
      model(batch_rows(), "left").sum().backward();
      const auto& grad = net->right->bias.grad();
      EXPECT_FLOAT_EQ(grad.defined() ? grad.item<float>() : 0,
                      world.rank == 0 ? 1 : 0);
      net->right->zero_grad();
      model(batch_rows(), "both").sum().backward();
      EXPECT_FLOAT_EQ(net->right->bias.grad().item<float>(), 1);
    }
  });
}

// The output of the right branch is computed but not used.
WORLD_TEST(DdpUnused, OutputsThatTheLossLeavesOutCountAsUnused, 2) {
  on_both_backends([&] {
    struct TwoImpl : torch::nn::Module {
      TwoImpl() {
        left = register_module("left", torch::nn::Linear(2, 1));
        right = register_module("right", torch::nn::Linear(2, 1));
      }
      std::tuple<torch::Tensor, std::map<std::string, torch::Tensor>> forward(
          const torch::Tensor& x) {
        return {left(x), {{"right", right(x)}}};
      }
      torch::nn::Linear left{nullptr}, right{nullptr};
    };
    auto net = std::make_shared<TwoImpl>();
    DistributedDataParallel<std::shared_ptr<TwoImpl>> model(
        net, {.find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      auto [left, others] = model(batch_rows());
      auto loss = left.sum();
      if (world.rank == 0) loss = loss + others["right"].sum();
      loss.backward();
      EXPECT_FLOAT_EQ(net->right->bias.grad().item<float>(), 0.5);
    }
  });
}

// Regression: the rank that did not use the embedding gave another number of
// sparse dimensions.
WORLD_TEST(DdpUnused, SparseEmbeddingsThatOneRankLeavesOutAreAveraged, 2, 3) {
  on_both_backends([&] {
    struct WordsImpl : torch::nn::Module {
      WordsImpl() {
        words = register_module(
            "words", torch::nn::Embedding(
                         torch::nn::EmbeddingOptions(4, 2).sparse(true)));
        scale = register_parameter("scale", torch::ones({1}));
      }
      torch::Tensor forward(bool uses) {
        const auto index = torch::tensor({1, 1, 3});
        return uses ? words(index).sum() * scale : scale * 2;
      }
      torch::nn::Embedding words{nullptr};
      torch::Tensor scale;
    };
    auto net = std::make_shared<WordsImpl>();
    DistributedDataParallel<std::shared_ptr<WordsImpl>> model(
        net, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(step != 2 && world.rank == step % world.size).sum().backward();
      const auto& grad = net->words->weight.grad();
      EXPECT_EQ(grad.defined(), step != 2);
      if (step == 2) continue;
      EXPECT_TRUE(grad.is_sparse());
      EXPECT_FLOAT_EQ(grad.to_dense()[1][0].item<float>(), 2.0F / world.size);
    }
  });
}

WORLD_TEST(DdpUnused, NoSyncRemembersWhatWasUsed, 2) {
  on_both_backends([&] {
    Branches net;
    DistributedDataParallel<Branches> model(net,
                                            {.find_unused_parameters = true});
    {
      auto guard = model.no_sync();
      model(batch_rows(), "right").sum().backward();
    }
    model(batch_rows(), "left").sum().backward();
    EXPECT_FLOAT_EQ(net->left->bias.grad().item<float>(), 1);
    EXPECT_FLOAT_EQ(net->right->bias.grad().item<float>(), 1);
  });
}

// Regression: the abandoned parameter got zeros, which weight decay follows.
WORLD_TEST(DdpUnused, WhatNoSyncUsedIsForgottenWithItsGradient, 2) {
  on_both_backends([&] {
    Branches net;
    DistributedDataParallel<Branches> model(net,
                                            {.find_unused_parameters = true});
    for (const bool to_none : {true, false}) {
      {
        auto guard = model.no_sync();
        model(batch_rows(), "right").sum().backward();
      }
      net->zero_grad(to_none);
      model(batch_rows(), "left").sum().backward();
      EXPECT_FLOAT_EQ(net->left->bias.grad().item<float>(), 1);
      // As in one process, zeros stay zeros.
      EXPECT_EQ(net->right->bias.grad().defined(), !to_none);
      if (!to_none) {
        EXPECT_EQ(net->right->bias.grad().item<float>(), 0);
      }
      net->zero_grad();
    }
  });
}

WORLD_TEST(DdpUnused, SkippedParametersLeaveTheBuckets, 2) {
  on_both_backends([&] {
    Branches net;
    DistributedDataParallel<Branches> model(
        net, {.find_unused_parameters = true,
              .skip_all_reduce_unused_params = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(batch_rows(), "left").sum().backward();
      EXPECT_FLOAT_EQ(net->left->bias.grad().item<float>(), 1);
      EXPECT_FALSE(net->right->bias.grad().defined());
    }
    size_t members = 0;
    for (const auto& bucket : model.bucket_names()) members += bucket.size();
    EXPECT_EQ(members, 2U);
    EXPECT_THAT(
        [&] { model(batch_rows(), "both").sum().backward(); },
        ThrowsMessage<std::runtime_error>(AllOf(
            HasSubstr("'right."), HasSubstr("skip_all_reduce_unused_params"))));
  });
}

WORLD_TEST(DdpStaticGraph, UnusedParametersAreLearntInTheFirstBackward, 2) {
  on_both_backends([&] {
    Branches net;
    DistributedDataParallel<Branches> model(net, {.static_graph = true});
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(batch_rows(), world.rank == 0 ? "both" : "left").sum().backward();
      EXPECT_FLOAT_EQ(net->left->bias.grad().item<float>(), 1) << step;
      EXPECT_FLOAT_EQ(net->right->bias.grad().item<float>(), 0.5) << step;
    }
  });
}

// The backward of this function runs a backward pass of its own, over the same
// parameters.
struct Nested : torch::autograd::Function<Nested> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& x, torch::nn::Module* net) {
    context->saved_data["net"] = reinterpret_cast<int64_t>(net);
    context->save_for_backward({x});
    at::NoGradGuard no_grad;
    return net->as<torch::nn::Linear>()->forward(x);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list grads) {
    auto* net = reinterpret_cast<torch::nn::Module*>(
        context->saved_data["net"].toInt());
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::Tensor out;
    {
      at::AutoGradMode enabled(true);
      out = net->as<torch::nn::Linear>()->forward(x);
    }
    out.backward(grads[0]);
    return {x.grad(), torch::Tensor()};
  }
};

// A part that is checkpointed `times` times, before a plain part.
struct CheckpointedImpl : torch::nn::Module {
  explicit CheckpointedImpl(int times_of) : times(times_of) {
    part = register_module("part", torch::nn::Linear(2, 2));
    last = register_module("last", torch::nn::Linear(2, 1));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x.requires_grad_();
    for (int i = 0; i < times; ++i) x = Nested::apply(x, part.get());
    return last(x);
  }
  int times;
  torch::nn::Linear part{nullptr}, last{nullptr};
};
TORCH_MODULE(Checkpointed);

void expect_checkpointed_gradients(int times, bool static_graph, int rank,
                                   int size) {
  Checkpointed net(times);
  DistributedDataParallel<Checkpointed> model(net,
                                              {.static_graph = static_graph});
  for (int step = 0; step < 3; ++step) {
    auto want = torch::zeros({2, 2});
    for (int r = 0; r < size; ++r) {
      auto x = torch::full({1, 2}, r + 1.0);
      for (int i = 0; i < times; ++i) x = net->part(x);
      want +=
          torch::autograd::grad({net->last(x).sum()}, {net->part->weight})[0] /
          size;
    }
    net->zero_grad();
    model(torch::full({1, 2}, rank + 1.0)).sum().backward();
    EXPECT_TRUE(torch::allclose(net->part->weight.grad(), want)) << step;
  }
}

WORLD_TEST(DdpReentrant, ACheckpointedPartIsAveraged, 2) {
  on_both_backends([&] {
    expect_checkpointed_gradients(1, false, world.rank, world.size);
    expect_checkpointed_gradients(1, true, world.rank, world.size);
  });
}

// The parameters stay in low precision until the outer backward has ended.
WORLD_TEST(DdpReentrant, NestedBackwardInLowPrecisionUnderNoSync, 2) {
  on_both_backends([&] {
    Checkpointed net(2);
    DistributedDataParallel<Checkpointed> model(
        net,
        {.static_graph = true,
         .mixed_precision = MixedPrecision{.param_dtype = torch::kBFloat16}});
    const auto x = torch::ones({1, 2});
    {
      auto local = model.no_sync();
      model(x).sum().backward();
    }
    EXPECT_EQ(net->part->weight.scalar_type(), torch::kFloat);
    ASSERT_TRUE(net->part->weight.grad().defined());
    auto want = torch::autograd::grad(
        {net->last(net->part(net->part(x))).sum()}, {net->part->weight})[0];
    EXPECT_TRUE(torch::allclose(net->part->weight.grad().to(torch::kFloat),
                                want, 2e-2, 2e-2));
  });
}

// Regression: a forward of the wrapper within such a backward took the copies
// in low precision for the parameters themselves.
WORLD_TEST(DdpReentrant, AForwardWithinALocalBackwardKeepsThePrecision, 2) {
  on_both_backends([&] {
    torch::nn::Linear net(2, 2);
    DistributedDataParallel<torch::nn::Linear> model(
        net,
        {.mixed_precision = MixedPrecision{.param_dtype = torch::kBFloat16}});
    const auto guard = model.no_sync();
    auto output = model(torch::ones({1, 2}));
    output.register_hook([&](const torch::Tensor& gradient) {
      const at::AutoGradMode recorded(true);
      model(torch::ones({1, 2}));
      return gradient;
    });
    (output * 1).sum().backward();
    EXPECT_EQ(net->weight.scalar_type(), torch::kFloat);
    EXPECT_TRUE(net->weight.grad().defined());
  });
}

WORLD_TEST(DdpReentrant, ASharedCheckpointedPartNeedsAStaticGraph, 2) {
  on_both_backends([&] {
    expect_checkpointed_gradients(3, true, world.rank, world.size);
    Checkpointed net(2);
    DistributedDataParallel<Checkpointed> model(net);
    EXPECT_THAT([&] { model(torch::ones({1, 2})).sum().backward(); },
                ThrowsMessage<std::runtime_error>(
                    AllOf(HasSubstr("'part."), HasSubstr("static_graph"))));
  });
}

WORLD_TEST(DdpReentrant, AStaticGraphThatChangesIsNamed, 2) {
  on_both_backends([&] {
    Checkpointed net(2);
    DistributedDataParallel<Checkpointed> model(net, {.static_graph = true});
    const auto x = torch::ones({1, 2});
    auto first = [&] {
      const auto guard = model.no_sync();
      return model(x).sum();
    }();
    (first + model(x).sum()).backward();
    EXPECT_THAT([&] { model(x).sum().backward(); },
                ThrowsMessage<std::runtime_error>(AllOf(
                    HasSubstr("'part."), HasSubstr("than in the first"))));
  });
}

// All of the module is checkpointed except a layer that is not used. Autograd
// reaches its parameters only in nested passes, and the end of a nested pass is
// not the end of the backward.
struct WholeImpl : torch::nn::Module {
  WholeImpl(int times_of, bool has_spare) : times(times_of) {
    part = register_module("part", torch::nn::Linear(2, 2));
    if (has_spare) spare = register_module("spare", torch::nn::Linear(2, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x.requires_grad_();
    for (int i = 0; i < times; ++i) x = Nested::apply(x, part.get());
    return x;
  }
  int times;
  torch::nn::Linear part{nullptr}, spare{nullptr};
};
TORCH_MODULE(Whole);

void expect_whole_gradients(int times, bool has_spare,
                            DistributedDataParallelOptions options, int rank,
                            int size) {
  Whole net(times, has_spare);
  DistributedDataParallel<Whole> model(net, options);
  for (int step = 0; step < 4; ++step) {
    auto want = torch::zeros({2, 2});
    for (int r = 0; r < size; ++r) {
      auto x = torch::full({1, 2}, r + 1.0 + step);
      for (int i = 0; i < times; ++i) x = net->part(x);
      want +=
          torch::autograd::grad({x.square().sum()}, {net->part->weight})[0] /
          size;
    }
    net->zero_grad();
    model(torch::full({1, 2}, rank + 1.0 + step)).square().sum().backward();
    EXPECT_TRUE(torch::allclose(net->part->weight.grad(), want)) << step;
    if (has_spare) {
      EXPECT_FALSE(net->spare->weight.grad().defined());
    }
  }
}

WORLD_TEST(DdpReentrant, AWholeModuleThatIsCheckpointedIsAveraged, 2, 3) {
  on_both_backends([&] {
    expect_whole_gradients(1, false, {}, world.rank, world.size);
    expect_whole_gradients(1, false, {.static_graph = true}, world.rank,
                           world.size);
    expect_whole_gradients(3, false, {.static_graph = true}, world.rank,
                           world.size);
    expect_whole_gradients(3, true, {.static_graph = true}, world.rank,
                           world.size);
    expect_whole_gradients(1, true, {.find_unused_parameters = true},
                           world.rank, world.size);
  });
}

WORLD_TEST(DdpReentrant, AnUnusedParameterOfACheckpointedModuleIsNamed, 2) {
  on_both_backends([&] {
    Whole net(1, true);
    DistributedDataParallel<Whole> model(net);
    EXPECT_THAT([&] { model(torch::ones({1, 2})).sum().backward(); },
                ThrowsMessage<std::runtime_error>(
                    AllOf(HasSubstr("backward ended without a gradient for"),
                          HasSubstr("'spare.weight'"))));
  });
}

// The loss has no tensor that forward returned, and the gradients come in a
// nested pass: the wrapper cannot know when the outer pass ends.
WORLD_TEST(DdpReentrant, NestedGradientsOfAHiddenLossAreRefused, 2) {
  on_both_backends([&] {
    struct HiddenImpl : torch::nn::Module {
      HiddenImpl() { part = register_module("part", torch::nn::Linear(2, 2)); }
      torch::Tensor forward(torch::Tensor x) {
        hidden = Nested::apply(x.requires_grad_(), part.get());
        return hidden * 2;
      }
      torch::Tensor hidden;
      torch::nn::Linear part{nullptr};
    };
    auto net = std::make_shared<HiddenImpl>();
    DistributedDataParallel<std::shared_ptr<HiddenImpl>> model(net);
    model(torch::ones({1, 2}));
    EXPECT_THAT([&] { net->hidden.sum().backward(); },
                ThrowsMessage<std::runtime_error>(HasSubstr(
                    "return the tensors from which the loss is computed")));
  });
}

}  // namespace
}  // namespace lockstep::internal
